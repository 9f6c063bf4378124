#include <torch/csrc/stable/library.h>

#include "arr_coc/common/alignment.cuh"
#include "arr_coc/common/column_units.cuh"
#include "arr_coc/common/rows.cuh"
#include "arr_coc/relevance_scores/one_read.cuh"
#include "arr_coc/relevance_scores/relevance_scores.h"
#include "arr_coc/relevance_scores/scoring.cuh"

namespace arr_coc {
namespace {

// See relevance_scores.cpp for the formulas.

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// The shared memory that a block may use for unit vectors.
constexpr int64_t kVectorBytes = 96 << 10;

template <class T>
struct Call {
  using A = accumulate_t<T>;
  Scoring<T> scoring;
  const T *features, *query;
  const A* mean;                        // of each sample's features
  const A *alignment, *mean_alignment;  // [B, N], given where the kernel does not compute them; the second may be null
  int64_t batch, width;
  int64_t chunks;
  int warp_rows, step;  // rows a warp takes of a chunk, and how many at once
  A scale;
  bool query_aligned;
};

// All threads of the block write `vector` divided by its norm to shared memory; zeros if it is not kept.
template <class V, class T, class A>
__device__ __forceinline__ void keep_unit(const V* vector, bool aligned, bool kept, int64_t width,
                                          SharedVector<T, A> out, A* shared) {
  constexpr int kPer = kVector<T>;
  A square = 0;
  for (int64_t piece = threadIdx.x; piece * kPer < width; piece += kThreads) {
    A values[kPer];
    if (aligned) {
      load<true>(vector, piece * kPer, width, values);
    } else {
      load<false>(vector, piece * kPer, width, values);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      values[i] = kept ? values[i] : A(0);
      square += values[i] * values[i];
    }
    out.store(0, int(piece / kWarpSize), values);
  }
  const A inverse = inverse_norm(sqrt(block_sum(square, shared)));
  for (int64_t piece = threadIdx.x; piece * kPer < width; piece += kThreads) {
    A values[kPer];
    out.load(0, int(piece / kWarpSize), values);
#pragma unroll
    for (int i = 0; i < kPer; ++i) values[i] *= inverse;
    out.store(0, int(piece / kWarpSize), values);
  }
}

// One block per chunk of a sample. Query, Mean: compute cosines with the query's only token and with the sample's mean
// here, from unit vectors in shared memory.
template <bool Wide, bool Aligned, bool Query, bool Mean, class T>
__global__ void __launch_bounds__(kThreads, 2) relevance_kernel(const Call<T> call) {
  using A = accumulate_t<T>;
  constexpr int kVectors = Query + Mean;
  extern __shared__ uint4 memory[];
  __shared__ A shared[kWarps], outstanding[kThreads];
  const int lane = threadIdx.x % kWarpSize, group = lane / kGroup;
  const Scoring<T>& scoring = call.scoring;
  const int64_t count = scoring.count(), width = call.width;
  SharedVector<T, A> vectors[2];
  vectors[0].data = reinterpret_cast<A*>(memory);
  vectors[1].data = vectors[0].data + vectors[0].size(width);
  // The last samples come first, because the cache still holds them from computing the mean.
  const int64_t items = call.batch * call.chunks;
  for (int64_t at = blockIdx.x; at < items; at += gridDim.x) {
    const int64_t item = items - 1 - at, sample = item / call.chunks;
    const int64_t first = (item % call.chunks * kWarps + threadIdx.x / kWarpSize) * call.warp_rows;
    const bool kept = scoring.keeps(sample);
    const int64_t chunk = item % call.chunks * kWarps * call.warp_rows;
    const auto prepare = [&] {
      __syncthreads();  // the last chunk is done with shared memory
      if (const int64_t n = chunk + threadIdx.x; threadIdx.x < kWarps * call.warp_rows && n < count) {
        outstanding[threadIdx.x] = scoring.salience(sample, n);
      }
      if constexpr (Query) keep_unit(call.query + sample * width, call.query_aligned, kept, width, vectors[0], shared);
      if constexpr (Mean) keep_unit(call.mean + sample * width, true, true, width, vectors[Query], shared);
      __syncthreads();
    };
    const auto score = [&](int from, int rows, const RowSums<kVectors, A>& sums) {
      if (lane % kGroup != 0 || group >= rows) return;
      const int64_t index = sample * count + first + from + group;
      const A inverse = inverse_norm(sqrt(sums.square));
      A alignment, salience = outstanding[first - chunk + from + group];
      if constexpr (Query) {
        alignment = kept ? (1 + sums.products[0] * inverse) / 2 : A(0);
      } else {
        alignment = call.alignment[index];
      }
      if constexpr (Mean) {
        salience += scoring.features_weight * (1 - sums.products[Query] * inverse) / 2;
      } else if (call.mean_alignment) {
        salience += scoring.features_weight * (1 - call.mean_alignment[index]);
      }
      scoring.write(sample, index, sums.entropy.bits(), salience, alignment);
    };
    const int rows = int(max(min(int64_t(call.warp_rows), count - first), int64_t(0)));
    scan_rows<Wide, Aligned, kVectors>(call.features + (sample * count + first) * width, rows, call.step, width,
                                       call.scale, vectors, prepare, score);
  }
}

template <bool Wide, bool Aligned, bool Query, bool Mean, class T>
void launch(const Call<T>& call, const Cuda& device) {
  using A = accumulate_t<T>;
  const size_t bytes = (Query + Mean) * SharedVector<T, A>::size(call.width) * sizeof(A);
  const auto kernel = relevance_kernel<Wide, Aligned, Query, Mean, T>;
  constexpr size_t kOwn = (kWarps + kThreads) * sizeof(A);  // the kernel's own shared memory counts too
  if (bytes + kOwn > 48 << 10)
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
  device.launch(kernel, {grid_size(call.batch * call.chunks, 1), kThreads, bytes}, call);
}

template <bool Wide, class T>
void launch(const Call<T>& call, const Cuda& device) {
  if (call.alignment)
    return call.mean ? launch<Wide, true, false, true>(call, device) : launch<Wide, true, false, false>(call, device);
  return call.mean ? launch<Wide, true, true, true>(call, device) : launch<Wide, true, true, false>(call, device);
}

}  // namespace

template <class T>
void run(const Cuda& device, const RelevanceScores<T>& inputs) {
  using A = accumulate_t<T>;
  const int64_t batch = inputs.batch, count = inputs.rows * inputs.columns, width = inputs.width,
                tokens = inputs.tokens;
  std::optional<AlignedData<T>> features;
  std::optional<Queries<T>> queries;
  std::optional<Scratch<A>> partial, mean, alignment, mean_alignment;
  Call<T> call{};
  call.scoring = Scoring<T>(inputs), call.features = inputs.features, call.query = inputs.query;
  if (width % kVector<T> == 0)  // so that alignment does not affect the result's bits
    call.features = features.emplace(device, inputs.features, batch * count * width).data();
  if (has_whole_vectors(call.features, width) && one_read::run(device, inputs, call.features)) return;
  call.batch = batch, call.width = width;
  call.warp_rows = rows_per_warp(batch * count), call.step = std::min(call.warp_rows, kBatch);
  call.chunks = (count + kWarps * call.warp_rows - 1) / (kWarps * call.warp_rows);
  call.scale = inputs.scale, call.query_aligned = has_whole_vectors(call.query, width);
  const bool aligned = has_whole_vectors(call.features, width);
  const bool fits = aligned && 2 * SharedVector<T, A>::size(width) * int64_t(sizeof(A)) <= kVectorBytes;
  if (inputs.salience.features > 0) {
    const ColumnCut cut(batch, count, width);
    partial.emplace(device, cut.partial_size()), mean.emplace(device, batch * width);
    launch_column_sums<T, A>(call.features, nullptr, nullptr, partial->data(), cut, device);
    if (fits) {
      launch_mean<A>(partial->data(), mean->data(), cut, device);
      call.mean = mean->data();
    } else {
      launch_mean_unit<A>(partial->data(), mean->data(), nullptr, cut, device);
      call.mean_alignment = mean_alignment.emplace(device, batch * count).data();
      launch_alignment<T, A>(call.features, mean->data(), nullptr, mean_alignment->data(), batch, count, 1, width,
                             device);
    }
  }
  if (tokens > 1 || !fits) {
    queries.emplace(device, call.query, inputs.mask, batch * tokens, width);
    call.alignment = alignment.emplace(device, batch * count).data();
    launch_alignment<T, A>(call.features, queries->unit.data(), inputs.mask, alignment->data(), batch, count, tokens,
                           width, device);
  }
  if (!aligned) return launch<true, false, false, false>(call, device);
  if constexpr (!std::is_same_v<T, double>)
    if (width <= kTile<T>) return launch<false>(call, device);
  launch<true>(call, device);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("relevance_scores", TORCH_BOX(&relevance_scores<Cuda>)); }

}  // namespace arr_coc
