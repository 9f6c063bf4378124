// Scores with one read of the features, where clusters of blocks run: on Hopper and later.
#pragma once

#include "arr_coc/relevance_scores/slices.cuh"

namespace arr_coc {

namespace one_read {

constexpr int kFinishThreads = 128;
constexpr int kParts = 4;               // of a row: each has every fourth slice
constexpr int64_t kSharedRows = 32768;  // up to this many rows, as many threads as parts share a row

// What slices of a row add up to; the first three are its OnlineEntropy.
struct RowParts {
  float top, sum, weighted, square, along_query, along_mean;

  __device__ __forceinline__ OnlineEntropy<float> entropy() const { return {top, sum, weighted}; }

  __device__ __forceinline__ void add(const RowParts& other, float scale) {
    OnlineEntropy<float> mine = entropy(), others = other.entropy();
    if (mine.top != others.top) {  // seldom: most are zero
      const float higher = max(mine.top, others.top);
      mine.raise(higher, scale), others.raise(higher, scale);
    }
    *this = {mine.top,
             mine.sum + others.sum,
             mine.weighted + others.weighted,
             square + other.square,
             along_query + other.along_query,
             along_mean + other.along_mean};
  }
};

// Puts the slices of rows together. kSharers threads share a row, each in a warp of its own; the order of the sums is
// the same for one as for kParts. A block's rows are of one sample.
template <int kSharers, class T>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const Call<T> call, unsigned blocks) {
  constexpr int kRows = kFinishThreads / kSharers, kMine = kParts / kSharers, kDeep = kSharers == 1 ? 2 : 4;
  __shared__ RowParts shared[kSharers][kRows];
  __shared__ float salience[kRows];
  const unsigned sample = blockIdx.x / blocks, slices = call.slices;
  const int sharer = int(threadIdx.x) / kRows, row = int(threadIdx.x) % kRows, lane = threadIdx.x % kWarpSize;
  const int n = int(blockIdx.x % blocks) * kRows + row;
  const bool exists = n < call.cut.count;
  if (exists && sharer == kSharers - 1) salience[row] = call.scoring.salience(sample, n);
  wait_for_earlier_kernel();
  float query_square = 0, mean_square = 0;
  for (unsigned slice = lane; sharer == 0 && slice < slices; slice += kWarpSize) {
    query_square += call.query_squares[sample * slices + slice];
    mean_square += call.mean_squares[sample * slices + slice];
  }
  RowParts mine[kMine];
  for (unsigned first = sharer * kMine; exists && first < slices; first += kParts * kDeep) {
    RowParts loaded[kDeep][kMine];
    const auto for_slices = [&](const auto& f) {
#pragma unroll
      for (int k = 0; k < kDeep; ++k) {
#pragma unroll
        for (int i = 0; i < kMine; ++i)
          if (const unsigned slice = first + k * kParts + i; slice < slices) f(slice, loaded[k][i], mine[i]);
      }
    };
    for_slices([&](unsigned slice, RowParts& part, RowParts&) {
      const int64_t at = (int64_t(sample) * slices + slice) * call.cut.count + n;
      const float4 raw = __ldcs(call.parts + at);
      part = {raw.x, raw.y, raw.z, raw.w, __ldcs(call.along_query + at), __ldcs(call.along_mean + at)};
    });
    for_slices([&](unsigned slice, const RowParts& part, RowParts& sum) {
      if (slice < kParts) {
        sum = part;
      } else {
        sum.add(part, call.scale);
      }
    });
  }
  if constexpr (kSharers > 1) {
    shared[sharer][row] = mine[0];
    __syncthreads();
    if (sharer > 0) return;
  }
  const float inverse_query = inverse_norm(sqrtf(warp_sum(query_square)));
  const float inverse_mean = inverse_norm(sqrtf(warp_sum(mean_square)));
  if (!exists) return;
  const auto part = [&](int i) { return kSharers > 1 ? shared[i % kSharers][row] : mine[i % kMine]; };
  RowParts whole = part(0);
  if (slices > 1) whole.add(part(1), call.scale);
  if (slices > 2) {
    RowParts others = part(2);
    if (slices > 3) others.add(part(3), call.scale);
    whole.add(others, call.scale);
  }
  const float inverse = inverse_norm(sqrtf(whole.square));
  const float unlike = (1 - whole.along_mean * inverse_mean * inverse) / 2;
  const float alignment = call.scoring.keeps(sample) ? (1 + whole.along_query * inverse_query * inverse) / 2 : 0.0f;
  call.scoring.write(sample, int64_t(sample) * call.cut.count + n, whole.entropy().bits(),
                     salience[row] + call.scoring.features_weight * unlike, alignment);
}

// Its blocks start while those of slices_kernel still run, and wait for them.
template <int kSharers, class T>
void launch_finish(const Call<T>& call, int64_t batch, const Cuda& device) {
  constexpr int kRows = kFinishThreads / kSharers;
  const unsigned blocks = unsigned((call.cut.count + kRows - 1) / kRows);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(batch) * blocks, config.blockDim = kFinishThreads, config.stream = device.stream();
  config.attrs = &early, config.numAttrs = 1;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, finish_kernel<kSharers, T>, call, blocks));
}

// Returns whether it computed the scores. That depends on N, D, T, the device and the weights, not on B, so that a
// sample has the same bits in every batch. `features` starts on 16 bytes.
template <class T>
bool run(const Cuda& device, const RelevanceScores<T>& inputs, const T* features) {
  if constexpr (std::is_same_v<T, double>) {
    return false;
  } else {
    static_assert(sizeof(Memory<T>) <= kMemory);
    const int64_t batch = inputs.batch, count = inputs.rows * inputs.columns, width = inputs.width;
    if (inputs.tokens != 1 || inputs.salience.features <= 0) return false;
    if (width == 0 || width % kColumns<T> != 0 || count > kMostBlocks * kThreads) return false;
    const RowCut cut(count);
    const int clusters = clusters_at_a_time<slices_kernel<T>>(cut.blocks, kThreads, sizeof(Memory<T>));
    if (clusters == 0) return false;
    const int64_t slices = width / kColumns<T>, items = batch * slices, parts = items * count;
    Scratch<float> along_query(device, parts), along_mean(device, parts), squares(device, 2 * items);
    Scratch<float4> row_parts(device, parts);
    const Call<T> call{Scoring<T>(inputs),
                       features,
                       inputs.query,
                       row_parts.data(),
                       along_query.data(),
                       along_mean.data(),
                       squares.data(),
                       squares.data() + items,
                       cut,
                       unsigned(slices),
                       unsigned(items),
                       width,
                       inputs.scale,
                       1 / float(count)};
    const ClusterLaunch launch(cut.blocks, unsigned(std::min<int64_t>(clusters, items)), kThreads, sizeof(Memory<T>),
                               device.stream());
    STD_CUDA_CHECK(cudaLaunchKernelEx(&launch.config, slices_kernel<T>, call));
    const auto finish = batch * count <= kSharedRows ? launch_finish<kParts, T> : launch_finish<1, T>;
    finish(call, batch, device);
    return true;
  }
}

}  // namespace one_read

}  // namespace arr_coc
