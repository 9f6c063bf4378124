// Scores with one read of the features, where clusters of blocks run: on Hopper and later.
#pragma once

#include <atomic>

#include "ops/relevance_scores/slices.cuh"

namespace arr_coc {

namespace one_read {

constexpr int kFinishThreads = 128;

// One thread per row puts the parts of all slices together. A block's rows are of one sample.
template <class T>
__global__ void __launch_bounds__(kFinishThreads) finish_kernel(const Call<T> call, unsigned blocks) {
  const unsigned sample = blockIdx.x / blocks, slices = call.slices;
  const int n = int(blockIdx.x % blocks) * kFinishThreads + int(threadIdx.x), lane = threadIdx.x % kWarpSize;
  float query_square = 0, mean_square = 0;
  for (unsigned slice = lane; slice < slices; slice += kWarpSize) {
    query_square += call.query_squares[sample * slices + slice];
    mean_square += call.mean_squares[sample * slices + slice];
  }
  const float inverse_query = inverse_norm(sqrtf(warp_sum(query_square)));
  const float inverse_mean = inverse_norm(sqrtf(warp_sum(mean_square)));
  if (n >= call.cut.count) return;
  float salience = call.scoring.salience(sample, n), square = 0, along_query = 0, along_mean = 0;
  OnlineEntropy<float> entropy;
  int64_t at = int64_t(sample) * slices * call.cut.count + n;
#pragma unroll 8
  for (unsigned slice = 0; slice < slices; ++slice, at += call.cut.count) {
    const float4 raw = __ldcs(call.parts + at);
    OnlineEntropy<float> part{raw.x, raw.y, raw.z};
    const float top = max(entropy.top, part.top);
    entropy.raise(top, call.scale), part.raise(top, call.scale);
    entropy.sum += part.sum, entropy.weighted += part.weighted, square += raw.w;
    along_query += __ldcs(call.along_query + at), along_mean += __ldcs(call.along_mean + at);
  }
  const float inverse = inverse_norm(sqrtf(square));
  salience += call.scoring.features_weight * (1 - along_mean * inverse_mean * inverse) / 2;
  const float alignment = call.scoring.keeps(sample) ? (1 + along_query * inverse_query * inverse) / 2 : 0.0f;
  call.scoring.write(sample, int64_t(sample) * call.cut.count + n, entropy.bits(), salience, alignment);
}

// How a grid of clusters is launched.
struct Launch {
  cudaLaunchAttribute cluster{};
  cudaLaunchConfig_t config{};

  Launch(int blocks, unsigned clusters, size_t bytes, cudaStream_t stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(blocks), cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    config.gridDim = clusters * unsigned(blocks), config.blockDim = kThreads, config.dynamicSmemBytes = bytes;
    config.stream = stream, config.attrs = &cluster, config.numAttrs = 1;
  }

  Launch(const Launch&) = delete;  // `config` points to `cluster`
};

// How many clusters of `blocks` blocks the current device runs at a time; 0 if it runs none.
template <class T>
int clusters_at_a_time(int blocks) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kMostBlocks + 1] = {};  // plus one
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  if (device < kDevices && known[device][blocks] > 0) return known[device][blocks] - 1;
  const auto attribute = [device](cudaDeviceAttr which) {
    int value = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
  };
  constexpr int kBytes = sizeof(Memory<T>);
  int clusters = 0;
  // A library that was built for older GPUs alone runs on this one, too, from PTX in which the kernel is empty.
  cudaFuncAttributes built{};
  STD_CUDA_CHECK(cudaFuncGetAttributes(&built, slices_kernel<T>));
  if (built.ptxVersion >= 90 && attribute(cudaDevAttrClusterLaunch) &&
      attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= kBytes) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(slices_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    const Launch launch(blocks, 1, kBytes, nullptr);
    STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, slices_kernel<T>, &launch.config));
  }
  if (device < kDevices) known[device][blocks] = clusters + 1;
  return clusters;
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
    const int clusters = clusters_at_a_time<T>(cut.blocks);
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
    const Launch launch(cut.blocks, unsigned(std::min<int64_t>(clusters, items)), sizeof(Memory<T>), device.stream());
    STD_CUDA_CHECK(cudaLaunchKernelEx(&launch.config, slices_kernel<T>, call));
    const unsigned blocks = unsigned((count + kFinishThreads - 1) / kFinishThreads);
    finish_kernel<<<unsigned(batch) * blocks, kFinishThreads, 0, device.stream()>>>(call, blocks);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    return true;
  }
}

}  // namespace one_read

}  // namespace arr_coc
