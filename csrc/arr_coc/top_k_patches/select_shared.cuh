// Selection if a sample is too large for one block's registers, or k for its shared memory. Blocks share a sample and
// exchange counts from kernel to kernel.
#pragma once

#include "arr_coc/common/radix_select.cuh"

namespace arr_coc {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / kWarpSize;
constexpr int kTileItems = 8;  // keys of a thread at a time

// Each block has `share` elements of a sample.
struct Shares {
  int64_t batch, n, k, share;
  unsigned parts;  // blocks a sample
};

// The counts that blocks exchange from kernel to kernel, for one sample.
template <class Key>
struct alignas(sizeof(longlong2)) Progress {
  static constexpr int passes = (8 * int(sizeof(Key)) + kSelectBits - 1) / kSelectBits;
  unsigned long long histogram[passes][kSelectBins];
  Search<Key> search[passes];
};

// The state of the search before `pass`. All threads call it.
template <class Key>
__device__ Search<Key> search_before(const Progress<Key>& progress, int pass, int64_t k, int bits,
                                     FoundBin<unsigned long long>& found) {
  if (pass == 0) return {0, k, bits, false};
  Search<Key> search = progress.search[pass - 1];
  if (search.done) return search;
  advance<kThreads, unsigned long long>(search, [&](int bin) { return progress.histogram[pass - 1][bin]; }, found);
  return search;
}

template <class T>
__global__ __launch_bounds__(kThreads) void count_digits_kernel(const T* scores, Progress<ordered_key_t<T>>* progress,
                                                                Shares shares, int pass) {
  using Key = ordered_key_t<T>;
  using Tile = Keys<Key, kThreads, kTileItems>;
  __shared__ unsigned histogram[kSelectBins];
  __shared__ FoundBin<unsigned long long> found;
  for (int64_t item = blockIdx.x; item < shares.batch * shares.parts; item += gridDim.x) {
    const int64_t b = item / shares.parts, part = item % shares.parts;
    const Search<Key> search = search_before(progress[b], pass, shares.k, OrderedKey<T>::bits, found);
    if (part == 0 && threadIdx.x == 0) progress[b].search[pass] = search;
    if (search.done) continue;
    for (int bin = threadIdx.x; bin < kSelectBins; bin += kThreads) histogram[bin] = 0;
    __syncthreads();
    const int64_t end = min(shares.n, (part + 1) * shares.share);
    for (int64_t first = part * shares.share; first < end; first += Tile::size) {
      const unsigned n = unsigned(min(int64_t(Tile::size), end - first));
      Tile keys;
      keys.load(scores + b * shares.n + first, n);
      keys.count(search, OrderedKey<T>::bits, n, histogram);
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < kSelectBins; bin += kThreads)
      if (histogram[bin]) atomicAdd(&progress[b].histogram[pass][bin], histogram[bin]);
  }
}

// The number of keys below the cut, and at the cut, in each block's share.
template <class T>
__global__ __launch_bounds__(kThreads) void count_chosen_kernel(const T* scores, Progress<ordered_key_t<T>>* progress,
                                                                longlong2* totals, Shares shares, int passes) {
  using Key = ordered_key_t<T>;
  using Tile = Keys<Key, kThreads, kTileItems>;
  __shared__ FoundBin<unsigned long long> found;
  __shared__ int64_t sums[kWarps];
  for (int64_t item = blockIdx.x; item < shares.batch * shares.parts; item += gridDim.x) {
    const int64_t b = item / shares.parts, part = item % shares.parts;
    const Search<Key> search = search_before(progress[b], passes, shares.k, OrderedKey<T>::bits, found);
    const Cut<Key> cut = search.cut();
    int64_t below = 0, equal = 0;
    const int64_t end = min(shares.n, (part + 1) * shares.share);
    for (int64_t first = part * shares.share; first < end; first += Tile::size) {
      const unsigned n = unsigned(min(int64_t(Tile::size), end - first));
      Tile keys;
      keys.load(scores + b * shares.n + first, n);
#pragma unroll
      for (int j = 0; j < kTileItems; ++j) {
        below += keys.exists(j, n) && cut.below(keys.key[j]);
        equal += keys.exists(j, n) && cut.equal(keys.key[j]);
      }
    }
    below = block_sum(below, sums);
    equal = block_sum(equal, sums);
    if (threadIdx.x == 0) totals[item] = {below, equal};
  }
}

// Writes the chosen keys in the order of the index.
template <class T>
__global__ __launch_bounds__(kThreads) void write_chosen_kernel(const T* scores,
                                                                const Progress<ordered_key_t<T>>* progress,
                                                                const longlong2* totals, ordered_key_t<T>* chosen,
                                                                int64_t* indices, Shares shares, int passes) {
  using Key = ordered_key_t<T>;
  using Tile = Keys<Key, kThreads, kTileItems>;
  __shared__ FoundBin<unsigned long long> found;
  __shared__ int64_t sums[kWarps];
  __shared__ TileCounts<kThreads, kTileItems> counts;
  for (int64_t item = blockIdx.x; item < shares.batch * shares.parts; item += gridDim.x) {
    const int64_t b = item / shares.parts, part = item % shares.parts;
    const Cut<Key> cut = search_before(progress[b], passes, shares.k, OrderedKey<T>::bits, found).cut();
    int64_t below = 0, equal = 0;
    for (int64_t earlier = threadIdx.x; earlier < part; earlier += kThreads) {
      below += totals[item - part + earlier].x;
      equal += totals[item - part + earlier].y;
    }
    below = block_sum(below, sums);
    equal = block_sum(equal, sums);
    const int64_t end = min(shares.n, (part + 1) * shares.share);
    for (int64_t first = part * shares.share; first < end; first += Tile::size) {
      const unsigned n = unsigned(min(int64_t(Tile::size), end - first));
      Tile keys;
      keys.load(scores + b * shares.n + first, n);
      compact(keys, cut, n, below, equal, counts, [&](unsigned i, int64_t slot, Key key) {
        chosen[b * shares.k + slot] = key;
        indices[b * shares.k + slot] = first + i;
      });
      __syncthreads();
    }
  }
}

}  // namespace
}  // namespace arr_coc
