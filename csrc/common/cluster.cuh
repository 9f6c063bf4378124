// What Hopper adds for blocks that work together: barriers in shared memory that copies and other blocks complete.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace arr_coc {

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
