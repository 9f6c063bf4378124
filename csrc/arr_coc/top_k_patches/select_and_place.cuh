// Selects and places in one kernel, for samples that one block's registers hold. What becomes of a chosen row is a
// parameter: top_k_patches copies it, select_patches multiplies it.
#pragma once

#include "arr_coc/common/radix_select.cuh"
#include "arr_coc/top_k_patches/row_copy.cuh"

namespace arr_coc {
namespace {

constexpr int kMostPlaced = 2048;  // chosen keys that a block holds in shared memory

// `keys` are a sample's chosen keys, in the order of the index. For each slot, one warp finds its key's rank among
// them, which is its place in the result, and calls `placing` for its row (or a segment, from byte `first` on). This is
// block `part` of the sample's `parts`.
template <class Key, class IndexAt, class Placing>
__device__ __forceinline__ void place_rows(const Key* keys, const IndexAt& index_at, int64_t sample, unsigned k,
                                           const Placing& placing, unsigned part, unsigned parts) {
  const int lane = threadIdx.x % kWarpSize;
  const unsigned warps = blockDim.x / kWarpSize;
  for (unsigned item = part * warps + threadIdx.x / kWarpSize; item < k * placing.rows.segments;
       item += parts * warps) {
    const unsigned slot = item % k;
    const int64_t index = index_at(slot), first = item / k * placing.rows.segment;
    const Key key = keys[slot];
    unsigned rank = 0;
    for (unsigned j = lane; j < k; j += kWarpSize) rank += j < slot ? keys[j] <= key : keys[j] < key;
    rank = __reduce_add_sync(kFullWarp, rank);
    placing(sample, k, index, rank, first);
  }
}

// Handles a whole sample if a block's registers hold its keys and shared memory holds the k chosen ones. Each of a
// sample's `parts` blocks does the whole selection, which is faster than communication, and copies its share of rows.
template <class T, class Placing, int kThreads, int kItems>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void select_and_place_kernel(const T* scores, Placing placing,
                                                                                     int64_t batch, unsigned n,
                                                                                     unsigned k, unsigned parts) {
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
    place_rows(
        shared.chosen.keys, [&](unsigned slot) { return int64_t(shared.chosen.index[slot]); }, b, k, placing,
        unsigned(item % parts), parts);
    __syncthreads();
  }
}

unsigned blocks_at_once(int blocks_per_multiprocessor) {
  return unsigned(device_attribute(cudaDevAttrMultiProcessorCount) * blocks_per_multiprocessor);
}

// The number of blocks of `threads` per sample for placing rows: enough to fill the GPU, but each has work.
unsigned parts_for(int threads, int64_t batch, int64_t k, const RowCopy& rows) {
  const int64_t warps = threads / kWarpSize, useful = (k * rows.segments + warps - 1) / warps;
  return unsigned(std::clamp<int64_t>(blocks_at_once(1024 / threads) / batch, 1, useful));
}

// Returns false, and does nothing, if a block does not hold a sample.
template <class T, class Placing>
bool select_and_place(const T* scores, const Placing& placing, int64_t batch, int64_t n, int64_t k,
                      const Cuda& device) {
  using Key = ordered_key_t<T>;
  constexpr int kMostItems = 64 / sizeof(Key);  // registers of a thread
  if (k > kMostPlaced || n > Keys<Key, 1024, kMostItems>::size) return false;
  const auto launch = [&](auto kernel, int threads) {
    const unsigned parts = parts_for(threads, batch, k, placing.rows);
    device.launch(kernel, {grid_size(batch * parts, 1), threads}, scores, placing, batch, unsigned(n), unsigned(k),
                  parts);
  };
  if (n <= Keys<Key, 512, 2>::size) {
    launch(select_and_place_kernel<T, Placing, 512, 2>, 512);
  } else if (n <= Keys<Key, 512, 8>::size) {
    launch(select_and_place_kernel<T, Placing, 512, 8>, 512);
  } else {
    launch(select_and_place_kernel<T, Placing, 1024, kMostItems>, 1024);
  }
  return true;
}

}  // namespace
}  // namespace arr_coc
