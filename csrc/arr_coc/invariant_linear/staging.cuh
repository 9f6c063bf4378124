// Copies of single numbers to shared memory, in the computing type, in the background where the GPU can.
#pragma once

#include <cstdint>

#include "arr_coc/common/cuda.cuh"

namespace arr_coc {

// Stores a number, or zero. It is there for others after wait_for_groups_but and a barrier.
template <class T, class A>
__device__ __forceinline__ void copy_number(A* to, const T* from, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == sizeof(A)) {  // also without alignment to 16 bytes; `from` is not read if there is no byte
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to)), bytes = valid ? sizeof(T) : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(sizeof(T)), "r"(bytes)
                 : "memory");
    return;
  }
#endif
  *to = valid ? A(*from) : A(0);
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void end_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kGroups of this thread's groups still run.
template <int kGroups>
__device__ __forceinline__ void wait_for_groups_but() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

}  // namespace arr_coc
