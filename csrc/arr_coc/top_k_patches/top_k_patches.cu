#include <torch/csrc/stable/library.h>

#include <cassert>
#include <utility>

#include "arr_coc/top_k_patches/select_and_place.cuh"
#include "arr_coc/top_k_patches/select_shared.cuh"

namespace arr_coc {
namespace {

// A chosen row is copied to its place, and its index is written.
template <int kUnit>
struct CopiedRows {
  RowCopy rows;
  int64_t* indices;

  __device__ __forceinline__ void operator()(int64_t sample, unsigned k, int64_t index, unsigned rank,
                                             int64_t first) const {
    if (threadIdx.x % kWarpSize == 0 && first == 0) indices[sample * k + rank] = index;
    copy_row<kUnit>(rows.from.row(sample, index) + first, rows.to.row(sample, rank) + first,
                    min(rows.segment, rows.bytes - first), rows.unit);
  }
};

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

// The chosen keys and indices, in the order of the index.
template <class Key, class Placing>
__global__ __launch_bounds__(kThreads) void place_kernel(const Key* chosen, const int64_t* chosen_indices,
                                                         Placing placing, int64_t batch, unsigned k, unsigned parts) {
  __shared__ Key keys[kMostPlaced];
  for (int64_t item = blockIdx.x; item < batch * parts; item += gridDim.x) {
    const int64_t b = item / parts;
    for (unsigned j = threadIdx.x; j < k; j += kThreads) keys[j] = chosen[b * k + j];
    __syncthreads();
    place_rows(
        keys, [&](unsigned slot) { return chosen_indices[b * k + slot]; }, b, k, placing, unsigned(item % parts),
        parts);
    __syncthreads();
  }
}

constexpr int kSortThreads = 1024;

// Sorts each tile of each sample in place.
template <class Key>
__global__ __launch_bounds__(kSortThreads) void sort_tiles_kernel(Key* keys, int64_t* indices, int64_t batch,
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
    copy_row<kUnit>(rows.from.row(b, kGather ? index : place) + first, rows.to.row(b, kGather ? place : index) + first,
                    min(rows.segment, rows.bytes - first), rows.unit);
  }
}

// A block writes kScattered rows of a sample, one warp a row: those that an index names are copied, the others become
// 0.
constexpr int kScattered = 8;

__global__ __launch_bounds__(kScattered* kWarpSize) void scatter_rows_kernel(RowCopy rows, const int64_t* indices,
                                                                             int64_t limit, int64_t k, int64_t blocks,
                                                                             int64_t items) {
  __shared__ int64_t places[kScattered];
  const int warp = threadIdx.x / kWarpSize;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t b = item / blocks, first = item % blocks * kScattered, row = first + warp;
    if (threadIdx.x < kScattered) places[threadIdx.x] = -1;
    __syncthreads();
    for (int64_t place = threadIdx.x; place < k; place += blockDim.x) {
      const int64_t index = indices[b * k + place];
      assert(0 <= index && index < limit);
      if (first <= index && index < first + kScattered) places[index - first] = place;
    }
    __syncthreads();
    const int64_t place = places[warp];
    if (row < limit) {
      map_row_as<uint4, 8>(
          rows.from.row(b, max(place, int64_t(0))), rows.to.row(b, row), rows.bytes,
          [place](const uint4* unit) { return place < 0 ? uint4{} : __ldg(unit); }, [](uint4 unit) { return unit; });
    }
    __syncthreads();
  }
}

template <bool kGather>
void copy_rows(const RowCopy& rows, const int64_t* indices, int64_t limit, int64_t batch, int64_t k,
               const Cuda& device) {
  if (rows.bytes == 0) return;
  const int64_t items = batch * k * rows.segments;
  with_unit(rows, [&](auto unit) {
    device.launch(copy_rows_kernel<kGather, unit>, {grid_size(items, kWarps), kThreads}, rows, indices, limit, k,
                  items);
  });
}

// Sorts each tile, then merges runs of doubling length so that the last merge writes `merged`.
template <class Key>
void sort_chosen(Key* keys, Key* merged_keys, int64_t* places, int64_t* merged, int64_t batch, int64_t k,
                 const Cuda& device) {
  const int64_t tiles = (k + Tile<Key>::size - 1) / Tile<Key>::size;
  device.launch(sort_tiles_kernel<Key>, {grid_size(batch * tiles, 1), kSortThreads}, keys, places, batch, k);
  for (int64_t run = Tile<Key>::size; run < k; run *= 2) {
    device.launch(merge_runs_kernel<Key>, {grid_size(batch * k, 256), 256}, keys, places, merged_keys, merged, batch, k,
                  run);
    std::swap(keys, merged_keys);
    std::swap(places, merged);
  }
}

template <class T>
void select_then_place(const Cuda& device, const TopKPatches<T>& call, const RowCopy& rows) {
  using Key = ordered_key_t<T>;
  constexpr int passes = (OrderedKey<T>::bits + kSelectBits - 1) / kSelectBits;
  const int64_t batch = call.batch, n = call.n, k = call.k, tile = Keys<Key, kThreads, kTileItems>::size;
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
  STD_CUDA_CHECK(cudaMemsetAsync(progress, 0, batch * sizeof(Progress<Key>), device.stream()));
  for (int pass = 0; pass < passes; ++pass) {
    device.launch(count_digits_kernel<T>, {grid, kThreads}, in, progress, shares, pass);
  }
  device.launch(count_chosen_kernel<T>, {grid, kThreads}, in, progress, totals, shares, passes);
  device.launch(write_chosen_kernel<T>, {grid, kThreads}, in, progress, totals, keys, chosen, shares, passes);
  if (k <= kMostPlaced) {
    const unsigned parts = parts_for(kThreads, batch, k, rows);
    with_unit(rows, [&](auto unit) {
      using Placing = CopiedRows<unit>;
      device.launch(place_kernel<Key, Placing>, {grid_size(batch * parts, 1), kThreads}, keys, chosen,
                    Placing{rows, result}, batch, unsigned(k), parts);
    });
    return;
  }
  sort_chosen<Key>(keys, keys + batch * k, chosen, result, batch, k, device);
  copy_rows<true>(rows, call.indices, n, batch, k, device);
}

}  // namespace

template <class T>
void run(const Cuda& device, const TopKPatches<T>& call) {
  const RowCopy rows = row_copy(call.from, call.to, call.row_bytes);
  const bool placed = with_unit(rows, [&](auto unit) {
    return select_and_place(call.scores, CopiedRows<unit>{rows, call.indices}, call.batch, call.n, call.k, device);
  });
  if (!placed) select_then_place(device, call, rows);
}

template void run(const Cuda&, const TopKPatches<float>&);
template void run(const Cuda&, const TopKPatches<double>&);
template void run(const Cuda&, const TopKPatches<Half>&);
template void run(const Cuda&, const TopKPatches<BFloat16>&);

void run(const Cuda& device, const TopKPatchesGrad& call) {
  const int64_t bytes = call.batch * call.n * call.row_bytes;
  if (bytes == 0) return;
  const RowCopy rows = row_copy(call.from, call.to, call.row_bytes);
  // Few rows take less time in one kernel, whose blocks read all of a sample's indices.
  constexpr int64_t kFewBytes = 16 << 20;
  if (bytes <= kFewBytes && rows.unit == 16 && rows.segments == 1 &&
      call.k * int64_t(sizeof(int64_t)) <= kScattered * rows.bytes / 4) {
    const int64_t blocks = ceil_div(call.n, kScattered), items = call.batch * blocks;
    device.launch(scatter_rows_kernel, {grid_size(items, 1), kScattered * kWarpSize}, rows, call.indices, call.n,
                  call.k, blocks, items);
    return;
  }
  STD_CUDA_CHECK(cudaMemsetAsync(rows.to.base, 0, bytes, device.stream()));
  if (call.k > 0) copy_rows<false>(rows, call.indices, call.n, call.batch, call.k, device);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("top_k_patches", TORCH_BOX(&top_k_patches<Cuda>));
  m.impl("top_k_patches_grad", TORCH_BOX(&top_k_patches_grad<Cuda>));
}

}  // namespace arr_coc
