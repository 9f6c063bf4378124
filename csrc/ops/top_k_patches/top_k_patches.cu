#include <torch/csrc/stable/library.h>

#include <cassert>
#include <tuple>
#include <utility>

#include "common/ordered_key.h"
#include "common/radix_select.cuh"
#include "ops/top_k_patches/top_k_patches.h"

namespace arr_coc {
namespace {

// Selection compacts in the order of the index, so the slot an element got there breaks ties as its index does.
template <class Key>
struct alignas(2 * sizeof(Key)) Item {
  Key key;
  uint32_t slot;
  __device__ bool operator<(const Item& other) const { return key != other.key ? key < other.key : slot < other.slot; }
};

// What one block sorts in shared memory.
template <class Key>
struct Tile {
  static constexpr int size = 16384 / sizeof(Item<Key>);
  Item<Key> items[size];
  int64_t index[size];  // by slot
};

// Bitonic sort of the first `count` items, padded to a power of two with items that come last. All threads call it,
// after a barrier; it ends with one.
template <class Key>
__device__ void sort_items(Item<Key>* items, int count) {
  int size = 1;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += blockDim.x) items[i] = {~Key(0), ~0u};
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int low = 2 * pair - (pair & (stride - 1)), high = low + stride;
        const Item<Key> a = items[low], b = items[high];
        if ((b < a) == ((low & run) == 0)) {
          items[low] = b;
          items[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

// One block a sample. Where k fits a tile, `indices` gets the result; otherwise `keys` and `indices` get the selected
// elements in the order of the index, for the kernels below.
template <class T, bool kFitsTile>
__global__ __launch_bounds__(kSelectThreads) void select_kernel(const T* scores, ordered_key_t<T>* keys,
                                                                int64_t* indices, int64_t batch, int64_t n, int64_t k) {
  using Key = ordered_key_t<T>;
  __shared__ union {
    SelectShared select;
    Tile<Key> tile;
  } shared;
  __shared__ int64_t sums[kSelectWarps];
  for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
    const T* row = scores + b * n;
    const auto key_at = [row](int64_t i) { return descending_key(row[i]); };
    const Cut<Key> cut = block_select<OrderedKey<T>::bits, Key>(key_at, n, k, shared.select);
    block_compact(cut, key_at, n, sums, [&](int64_t i, int64_t slot, Key key) {
      if (kFitsTile) {
        shared.tile.items[slot] = {key, uint32_t(slot)};
        shared.tile.index[slot] = i;
      } else {
        keys[b * k + slot] = key;
        indices[b * k + slot] = i;
      }
    });
    __syncthreads();
    if (kFitsTile) {
      sort_items(shared.tile.items, int(k));
      for (int j = threadIdx.x; j < k; j += blockDim.x)
        indices[b * k + j] = shared.tile.index[shared.tile.items[j].slot];
      __syncthreads();
    }
  }
}

// Sorts each tile of each sample in place.
template <class Key>
__global__ __launch_bounds__(kSelectThreads) void sort_tiles_kernel(Key* keys, int64_t* indices, int64_t batch,
                                                                    int64_t k) {
  __shared__ Tile<Key> tile;
  const int64_t tiles = (k + tile.size - 1) / tile.size;
  for (int64_t t = blockIdx.x; t < batch * tiles; t += gridDim.x) {
    const int64_t within = t % tiles * tile.size, first = t / tiles * k + within;
    const int count = int(min(int64_t(tile.size), k - within));
    for (int j = threadIdx.x; j < count; j += blockDim.x) {
      tile.items[j] = {keys[first + j], uint32_t(j)};
      tile.index[j] = indices[first + j];
    }
    __syncthreads();
    sort_items(tile.items, count);
    for (int j = threadIdx.x; j < count; j += blockDim.x) {
      keys[first + j] = tile.items[j].key;
      indices[first + j] = tile.index[tile.items[j].slot];
    }
    __syncthreads();
  }
}

// Merges neighbouring sorted runs of `run` elements. An element's place in the merged run is its place in its own plus
// the number of elements of the other that come before it. The left run's indices are the lower ones, so among equal
// keys the left comes first.
template <class Key>
__global__ void merge_runs_kernel(const Key* keys, const int64_t* indices, Key* merged_keys, int64_t* merged_indices,
                                  int64_t batch, int64_t k, int64_t run) {
  for (int64_t e = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; e < batch * k;
       e += int64_t(gridDim.x) * blockDim.x) {
    const int64_t sample = e / k * k, i = e - sample;
    const bool left = i / run % 2 == 0;
    const int64_t begin = left ? min(k, (i / run + 1) * run) : (i / run - 1) * run, end = min(k, begin + run);
    const Key key = keys[e];
    int64_t low = begin, high = end;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      const Key other = keys[sample + middle];
      if (left ? other < key : other <= key) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int64_t place = sample + (left ? i : i - run) + (low - begin);
    merged_keys[place] = key;
    merged_indices[place] = indices[e];
  }
}

// Copies one row for each of rows = B k indices, between a tensor addressed by the index and one addressed by its
// place. `units` of Unit make a row; threads of x walk a row, y holds rows.
template <class Unit, bool kGather>
__global__ void copy_rows_kernel(RowsOf from, RowsOf to, const int64_t* indices, int64_t limit, int64_t k, int64_t rows,
                                 int64_t units) {
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
       row += int64_t(gridDim.x) * blockDim.y) {
    const int64_t b = row / k, place = row - b * k, index = indices[row];
    assert(0 <= index && index < limit);
    const Unit* source =
        reinterpret_cast<const Unit*>(from.base + b * from.sample_stride + (kGather ? index : place) * from.row_stride);
    Unit* target = reinterpret_cast<Unit*>(to.base + b * to.sample_stride + (kGather ? place : index) * to.row_stride);
    for (int64_t u = int64_t(blockIdx.y) * blockDim.x + threadIdx.x; u < units; u += int64_t(gridDim.y) * blockDim.x)
      target[u] = source[u];
  }
}

template <bool kGather, class Unit>
void copy_rows_as(const RowsOf& from, const RowsOf& to, const int64_t* indices, int64_t limit, int64_t k, int64_t rows,
                  int64_t bytes, cudaStream_t stream) {
  constexpr int threads = 256;
  const int64_t units = bytes / int64_t(sizeof(Unit));
  int width = 1;
  while (width < threads && width < units) width *= 2;
  const dim3 block(width, threads / width);
  // A wide row is shared out, four units a thread.
  const dim3 grid(grid_size(rows, block.y), grid_size(units, int64_t(width) * 4, 1024));
  copy_rows_kernel<Unit, kGather><<<grid, block, 0, stream>>>(from, to, indices, limit, k, rows, units);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// In the widest unit that divides every row's address and length.
template <bool kGather>
void copy_rows(const RowsOf& from, const RowsOf& to, const int64_t* indices, int64_t limit, int64_t k, int64_t rows,
               int64_t bytes, cudaStream_t stream) {
  if (rows == 0 || bytes == 0) return;
  const uint64_t bits = reinterpret_cast<uintptr_t>(from.base) | reinterpret_cast<uintptr_t>(to.base) |
                        uint64_t(from.sample_stride | from.row_stride | to.sample_stride | to.row_stride | bytes);
  if (bits % 16 == 0) return copy_rows_as<kGather, uint4>(from, to, indices, limit, k, rows, bytes, stream);
  if (bits % 8 == 0) return copy_rows_as<kGather, uint64_t>(from, to, indices, limit, k, rows, bytes, stream);
  if (bits % 4 == 0) return copy_rows_as<kGather, uint32_t>(from, to, indices, limit, k, rows, bytes, stream);
  copy_rows_as<kGather, uint16_t>(from, to, indices, limit, k, rows, bytes, stream);
}

// For a k that no tile holds: select, sort tiles, merge runs of doubling length, so that the last merge writes
// `indices`.
template <class T>
void select_and_merge(const Tensor& scores, Tensor& indices, int64_t k, cudaStream_t stream) {
  using Key = ordered_key_t<T>;
  constexpr ScalarType key_dtype = sizeof(Key) == 8 ? ScalarType::Long : ScalarType::Int;
  const int64_t batch = scores.size(0), n = scores.size(1);
  const Tensor key_space = torch::stable::new_empty(scores, {2, batch, k}, key_dtype);
  const Tensor index_space = torch::stable::new_empty(indices, {batch, k});
  Key* keys = static_cast<Key*>(key_space.mutable_data_ptr());
  Key* merged_keys = keys + batch * k;
  int64_t* places = static_cast<int64_t*>(index_space.mutable_data_ptr());
  int64_t* merged = static_cast<int64_t*>(indices.mutable_data_ptr());
  int passes = 0;
  for (int64_t run = Tile<Key>::size; run < k; run *= 2) ++passes;
  if (passes % 2 == 0) std::swap(places, merged);
  select_kernel<T, false><<<grid_size(batch, 1), kSelectThreads, 0, stream>>>(
      static_cast<const T*>(scores.const_data_ptr()), keys, places, batch, n, k);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const int64_t tiles = (k + Tile<Key>::size - 1) / Tile<Key>::size;
  sort_tiles_kernel<Key><<<grid_size(batch * tiles, 1), kSelectThreads, 0, stream>>>(keys, places, batch, k);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  for (int64_t run = Tile<Key>::size; run < k; run *= 2) {
    merge_runs_kernel<Key>
        <<<grid_size(batch * k, 256), 256, 0, stream>>>(keys, places, merged_keys, merged, batch, k, run);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    std::swap(keys, merged_keys);
    std::swap(places, merged);
  }
}

std::tuple<Tensor, Tensor> top_k_patches_cuda(const Tensor& relevance_scores, const Tensor& features, int64_t k) {
  check_top_k_patches(relevance_scores, features, k);
  const CudaScope scope(relevance_scores);
  const Tensor scores = torch::stable::contiguous(relevance_scores), from = with_whole_rows(features);
  const int64_t batch = scores.size(0), n = scores.size(1), width = features.size(2);
  Tensor selected = torch::stable::new_empty(features, {batch, k, width});
  Tensor indices = torch::stable::new_empty(scores, {batch, k}, ScalarType::Long);
  if (batch * k == 0) return {selected, indices};
  dispatch_floating(scores.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    if (k > Tile<ordered_key_t<T>>::size) return select_and_merge<T>(scores, indices, k, scope.stream());
    select_kernel<T, true><<<grid_size(batch, 1), kSelectThreads, 0, scope.stream()>>>(
        static_cast<const T*>(scores.const_data_ptr()), nullptr, static_cast<int64_t*>(indices.mutable_data_ptr()),
        batch, n, k);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  copy_rows<true>(rows_of(from), rows_of(selected), static_cast<const int64_t*>(indices.const_data_ptr()), n, k,
                  batch * k, width * features.element_size(), scope.stream());
  return {selected, indices};
}

Tensor top_k_patches_grad_cuda(const Tensor& grad, const Tensor& indices, int64_t num_patches) {
  check_top_k_patches_grad(grad, indices, num_patches);
  const CudaScope scope(grad);
  const Tensor from = with_whole_rows(grad), where = torch::stable::contiguous(indices);
  const int64_t batch = grad.size(0), k = grad.size(1), width = grad.size(2);
  Tensor grad_features = torch::stable::new_zeros(grad, {batch, num_patches, width});
  copy_rows<false>(rows_of(from), rows_of(grad_features), static_cast<const int64_t*>(where.const_data_ptr()),
                   num_patches, k, batch * k, width * grad.element_size(), scope.stream());
  return grad_features;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("top_k_patches", TORCH_BOX(&top_k_patches_cuda));
  m.impl("top_k_patches_grad", TORCH_BOX(&top_k_patches_grad_cuda));
}

}  // namespace arr_coc
