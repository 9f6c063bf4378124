#include <torch/csrc/stable/library.h>

#include <cassert>
#include <tuple>
#include <utility>

#include "ops/top_k_patches/select_shared.cuh"

namespace arr_coc {
namespace {

constexpr int kMostPlaced = 2048;  // chosen keys that a block holds in shared memory

// Selection keeps the order of the index, so an element's slot breaks ties like its index.
template <class Key>
struct alignas(2 * sizeof(Key)) Item {
  Key key;
  uint32_t slot;
  __device__ bool operator<(const Item& other) const { return key != other.key ? key < other.key : slot < other.slot; }
};

// The items that one block sorts in shared memory.
template <class Key>
struct Tile {
  static constexpr int size = 16384 / sizeof(Item<Key>);
  Item<Key> items[size];
  int64_t index[size];  // by slot
};

// Bitonic sort of the first `count` items, padded to a power of two with items that come last. All threads call it
// after a barrier; it ends with a barrier.
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

// Handles a whole sample if a block's registers hold its keys and shared memory holds the k chosen ones. Each of a
// sample's `parts` blocks does the whole selection, which is faster than communication, and copies its share of rows.
template <class T, int kUnit, int kThreads, int kItems>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void select_and_place_kernel(const T* scores, RowCopy rows,
                                                                                     int64_t* indices, int64_t batch,
                                                                                     unsigned n, unsigned k,
                                                                                     unsigned parts) {
  using Key = ordered_key_t<T>;
  __shared__ union {
    struct {
      unsigned histogram[kSelectBins];
      FoundBin<unsigned> found;
    } select;
    struct {
      Key keys[kMostPlaced];
      uint16_t index[kMostPlaced];
    } chosen;
  } shared;
  __shared__ TileCounts<kThreads, kItems> counts;
  static_assert(Keys<Key, kThreads, kItems>::size <= 1 << 16, "indices in 16 bits");
  for (int64_t item = blockIdx.x; item < batch * parts; item += gridDim.x) {
    const int64_t b = item / parts;
    for (int bin = threadIdx.x; bin < kSelectBins; bin += kThreads) shared.select.histogram[bin] = 0;
    Keys<Key, kThreads, kItems> keys;
    keys.load(scores + b * n, n);
    __syncthreads();
    Search<Key> search{0, k, OrderedKey<T>::bits, false};
    while (!search.done) {
      keys.count(search, OrderedKey<T>::bits, n, shared.select.histogram);
      __syncthreads();
      const auto take = [&](int bin) {  // and leave it empty for the next digit
        const unsigned count = shared.select.histogram[bin];
        shared.select.histogram[bin] = 0;
        return count;
      };
      advance<kThreads, unsigned>(search, take, shared.select.found);
    }
    unsigned below = 0, equal = 0;
    compact(keys, search.cut(), n, below, equal, counts, [&](unsigned i, unsigned slot, Key key) {
      shared.chosen.keys[slot] = key;
      shared.chosen.index[slot] = uint16_t(i);
    });
    __syncthreads();
    place_rows<kUnit>(
        shared.chosen.keys, [&](unsigned slot) { return int64_t(shared.chosen.index[slot]); }, b, k, rows, indices,
        unsigned(item % parts), parts);
    __syncthreads();
  }
}

// The chosen keys and indices, in the order of the index.
template <class Key, int kUnit>
__global__ __launch_bounds__(kThreads) void place_kernel(const Key* chosen, const int64_t* chosen_indices, RowCopy rows,
                                                         int64_t* indices, int64_t batch, unsigned k, unsigned parts) {
  __shared__ Key keys[kMostPlaced];
  for (int64_t item = blockIdx.x; item < batch * parts; item += gridDim.x) {
    const int64_t b = item / parts;
    for (unsigned j = threadIdx.x; j < k; j += kThreads) keys[j] = chosen[b * k + j];
    __syncthreads();
    place_rows<kUnit>(
        keys, [&](unsigned slot) { return chosen_indices[b * k + slot]; }, b, k, rows, indices, unsigned(item % parts),
        parts);
    __syncthreads();
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

// Merges neighbouring sorted runs of `run` elements. An element's place in the merged run is its place in its run plus
// the number of elements of the other run that come before it. The left run has the lower indices, so among equal keys
// its elements come first.
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

// Rows by an index tensor, one warp a row segment: gathered, or scattered.
template <bool kGather, int kUnit>
__global__ __launch_bounds__(kThreads) void copy_rows_kernel(RowCopy rows, const int64_t* indices, int64_t limit,
                                                             int64_t k, int64_t items) {
  for (int64_t item = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarpSize; item < items;
       item += int64_t(gridDim.x) * kWarps) {
    const int64_t row = item / rows.segments, first = item % rows.segments * rows.segment;
    const int64_t b = row / k, place = row - b * k, index = indices[row];
    assert(0 <= index && index < limit);
    copy_row<kUnit>(
        rows.from.base + b * rows.from.sample_stride + (kGather ? index : place) * rows.from.row_stride + first,
        rows.to.base + b * rows.to.sample_stride + (kGather ? place : index) * rows.to.row_stride + first,
        min(rows.segment, rows.bytes - first), rows.unit);
  }
}

template <bool kGather>
void copy_rows(const RowCopy& rows, const int64_t* indices, int64_t limit, int64_t batch, int64_t k,
               cudaStream_t stream) {
  if (rows.bytes == 0) return;
  const int64_t items = batch * k * rows.segments;
  with_unit(rows, [&](auto unit) {
    copy_rows_kernel<kGather, unit><<<grid_size(items, kWarps), kThreads, 0, stream>>>(rows, indices, limit, k, items);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

unsigned blocks_at_once(int blocks_per_multiprocessor) {
  int device = 0, multiprocessors = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return unsigned(multiprocessors * blocks_per_multiprocessor);
}

// The number of blocks of `threads` per sample for placing rows: enough to fill the GPU, but each has work.
unsigned parts_for(int threads, int64_t batch, int64_t k, const RowCopy& rows) {
  const int64_t warps = threads / kWarpSize, useful = (k * rows.segments + warps - 1) / warps;
  return unsigned(std::clamp<int64_t>(blocks_at_once(1024 / threads) / batch, 1, useful));
}

template <class T>
bool select_and_place(const TopKPatches<T>& call, const RowCopy& rows, cudaStream_t stream) {
  using Key = ordered_key_t<T>;
  const int64_t batch = call.batch, n = call.n, k = call.k;
  constexpr int kMostItems = 64 / sizeof(Key);  // registers of a thread
  if (k > kMostPlaced || n > Keys<Key, 1024, kMostItems>::size) return false;
  const auto launch = [&](auto kernel, int threads) {
    const unsigned parts = parts_for(threads, batch, k, rows);
    kernel<<<grid_size(batch * parts, 1), threads, 0, stream>>>(call.scores, rows, call.indices, batch, unsigned(n),
                                                                unsigned(k), parts);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  with_unit(rows, [&](auto unit) {
    if (n <= Keys<Key, 512, 2>::size) return launch(select_and_place_kernel<T, unit, 512, 2>, 512);
    if (n <= Keys<Key, 512, 8>::size) return launch(select_and_place_kernel<T, unit, 512, 8>, 512);
    launch(select_and_place_kernel<T, unit, 1024, kMostItems>, 1024);
  });
  return true;
}

// Sorts each tile, then merges runs of doubling length so that the last merge writes `merged`.
template <class Key>
void sort_chosen(Key* keys, Key* merged_keys, int64_t* places, int64_t* merged, int64_t batch, int64_t k,
                 cudaStream_t stream) {
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

template <class T>
void select_then_place(const Cuda& device, const TopKPatches<T>& call, const RowCopy& rows) {
  using Key = ordered_key_t<T>;
  constexpr int passes = (OrderedKey<T>::bits + kSelectBits - 1) / kSelectBits;
  const int64_t batch = call.batch, n = call.n, k = call.k, tile = Keys<Key, kThreads, kTileItems>::size;
  const cudaStream_t stream = device.stream();
  Shares shares{batch, n, k, 0, 0};
  shares.parts = unsigned(std::clamp<int64_t>(blocks_at_once(2) / batch, 1, (n + tile - 1) / tile));
  shares.share = ((n + shares.parts - 1) / shares.parts + tile - 1) / tile * tile;
  Scratch<Progress<Key>> progress_space(device, batch);
  Scratch<longlong2> totals_space(device, batch * shares.parts);
  Scratch<Key> key_space(device, 2 * batch * k);
  Scratch<int64_t> index_space(device, batch * k);
  const T* in = call.scores;
  Progress<Key>* progress = progress_space.data();
  longlong2* totals = totals_space.data();
  Key* keys = key_space.data();
  int64_t *chosen = index_space.data(), *result = call.indices;
  int merges = 0;
  for (int64_t run = Tile<Key>::size; run < k; run *= 2) ++merges;
  if (k > kMostPlaced && merges % 2 == 0) std::swap(chosen, result);

  const unsigned grid = grid_size(batch * shares.parts, 1);
  STD_CUDA_CHECK(cudaMemsetAsync(progress, 0, batch * sizeof(Progress<Key>), stream));
  for (int pass = 0; pass < passes; ++pass) {
    count_digits_kernel<T><<<grid, kThreads, 0, stream>>>(in, progress, shares, pass);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  count_chosen_kernel<T><<<grid, kThreads, 0, stream>>>(in, progress, totals, shares, passes);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  write_chosen_kernel<T><<<grid, kThreads, 0, stream>>>(in, progress, totals, keys, chosen, shares, passes);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (k <= kMostPlaced) {
    const unsigned parts = parts_for(kThreads, batch, k, rows);
    with_unit(rows, [&](auto unit) {
      place_kernel<Key, unit>
          <<<grid_size(batch * parts, 1), kThreads, 0, stream>>>(keys, chosen, rows, result, batch, unsigned(k), parts);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return;
  }
  sort_chosen<Key>(keys, keys + batch * k, chosen, result, batch, k, stream);
  copy_rows<true>(rows, call.indices, n, batch, k, stream);
}

}  // namespace

template <class T>
void run(const Cuda& device, const TopKPatches<T>& call) {
  const RowCopy rows = row_copy(call.from, call.to, call.row_bytes);
  if (!select_and_place(call, rows, device.stream())) select_then_place(device, call, rows);
}

void run(const Cuda& device, const TopKPatchesGrad& call) {
  const int64_t bytes = call.batch * call.n * call.row_bytes;
  if (bytes == 0) return;
  const RowCopy rows = row_copy(call.from, call.to, call.row_bytes);
  STD_CUDA_CHECK(cudaMemsetAsync(rows.to.base, 0, bytes, device.stream()));
  if (call.k > 0) copy_rows<false>(rows, call.indices, call.n, call.batch, call.k, device.stream());
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("top_k_patches", TORCH_BOX(&top_k_patches<Cuda>));
  m.impl("top_k_patches_grad", TORCH_BOX(&top_k_patches_grad<Cuda>));
}

}  // namespace arr_coc
