// What Hopper adds for blocks that work together: barriers in shared memory that copies and other blocks complete.
#pragma once

#include <atomic>
#include <cstdint>

#include "arr_coc/common/cuda.cuh"

namespace arr_coc {

// How a grid of clusters is launched: `clusters` of `blocks` blocks.
struct ClusterLaunch {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  ClusterLaunch(int blocks, unsigned clusters, int threads, size_t bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = unsigned(blocks), attribute.val.clusterDim.y = 1, attribute.val.clusterDim.z = 1;
    config.gridDim = clusters * unsigned(blocks), config.blockDim = unsigned(threads), config.dynamicSmemBytes = bytes;
    config.stream = stream, config.attrs = &attribute, config.numAttrs = 1;
  }

  ClusterLaunch(const ClusterLaunch&) = delete;  // `config` points to `attribute`
};

// How many clusters of `blocks` blocks the current device runs at a time; 0 if it runs none.
template <auto kKernel>
int clusters_at_a_time(int blocks, int threads, int bytes) {
  constexpr int kDevices = 64, kMostBlocks = 8;
  static std::atomic<int> known[kDevices][kMostBlocks + 1] = {};  // plus one
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  if (device < kDevices && known[device][blocks] > 0) return known[device][blocks] - 1;
  int clusters = 0;
  // A library that was built for older GPUs alone runs on this one, too, from PTX in which the kernel is empty.
  cudaFuncAttributes built{};
  STD_CUDA_CHECK(cudaFuncGetAttributes(&built, kKernel));
  if (built.ptxVersion >= 90 && device_attribute(cudaDevAttrClusterLaunch) &&
      device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= bytes) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const ClusterLaunch launch(blocks, 1, threads, size_t(bytes), nullptr);
    STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kKernel, &launch.config));
  }
  if (device < kDevices) known[device][blocks] = clusters + 1;
  return clusters;
}

using Barrier = uint64_t;  // in shared memory

// A kernel that was launched with programmatic stream serialisation may start as soon as every block of the kernel
// before it has called this; what that kernel writes is there once wait_for_earlier_kernel returns.
__device__ __forceinline__ void let_later_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_earlier_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t shared_address(const void* data) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(data));
}

__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t blocks_in_cluster() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void start_barrier(Barrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes started barriers known to the cluster's other blocks, once sync_cluster has been called.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and lets the phase end only when `bytes` have been stored.
__device__ __forceinline__ void expect(Barrier* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait(Barrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Copies 16 bytes to shared memory in the background, past the first-level cache.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The thread arrives when its copies so far have come.
__device__ __forceinline__ void arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Stores to the place of `to` in the shared memory of the cluster's block `rank`, and counts the bytes at its barrier.
__device__ __forceinline__ void store_async(float* to, Barrier* barrier, uint32_t rank, const float4& value) {
  asm volatile(
      "{\n"
      ".reg .b32 data, barrier;\n"
      "mapa.shared::cluster.u32 data, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [data], {%3, %4, %5, %6}, [barrier];\n"
      "}" ::"r"(shared_address(to)),
      "r"(shared_address(barrier)), "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

// The place of `data` in the shared memory of the cluster's block `rank`.
template <class T>
__device__ __forceinline__ const T* in_block(const T* data, uint32_t rank) {
  const T* there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(data), "r"(rank));
  return there;
}

// Waits for `threads` threads of the block that name the same `which`, from 1 to 15.
__device__ __forceinline__ void sync_some(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

// Counts the warp's threads among those that sync_some waits for, and goes on.
__device__ __forceinline__ void arrive_for_some(int which, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

#endif

}  // namespace arr_coc
