// The product for few rows: a warp computes one part of the sums of 4 rows and 8 columns, one sum a lane. Copies of
// single numbers to shared memory, in the computing type, in the background where the GPU can.
#pragma once

#include <cstdint>

#include "arr_coc/common/cuda.cuh"
#include "arr_coc/invariant_linear/invariant_linear.h"

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

constexpr int kFewRows = 4, kFewColumns = 8;
static_assert(kFewRows * kFewColumns == kWarpSize);

// The bias of a column, zero if there is none. It is never -0, so that a sum of -0 is 0 in every way to compute it.
template <class T>
__device__ __forceinline__ accumulate_t<T> bias_of(const InvariantLinear<T>& call, int64_t column) {
  using A = accumulate_t<T>;
  return A(0) + (call.bias && column < call.width ? A(call.bias[column]) : A(0));
}

// What a warp holds of its part's numbers.
template <class A>
struct FewRowsOfPart {
  static constexpr int kStep = 32, kStages = sizeof(A) == 4 ? 6 : 3;
  static constexpr int kLines = kFewRows + kFewColumns, kLine = kStep + 4;  // eight lines lie in different banks
  alignas(16) A numbers[kStages][kLines][kLine];
};

// One block for 4 rows and 8 columns, one warp for each part.
template <class T>
__global__ void few_rows_kernel(InvariantLinear<T> call) {
  using A = accumulate_t<T>;
  using Memory = FewRowsOfPart<A>;
  constexpr int kStep = Memory::kStep, kStages = Memory::kStages;
  extern __shared__ __align__(16) char bytes[];
  const int part = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  auto& staged = reinterpret_cast<Memory*>(bytes)[part].numbers;
  const unsigned across = unsigned((call.width + kFewColumns - 1) / kFewColumns);
  const int64_t row = int64_t(blockIdx.x / across) * kFewRows, column = int64_t(blockIdx.x % across) * kFewColumns;
  const int64_t begin = part * call.order.part_length, end = min(begin + call.order.part_length, call.in);
  const int steps = begin < end ? int((end - begin + kStep - 1) / kStep) : 0;

  const auto load = [&](int step) {
    const int64_t k = begin + int64_t(step) * kStep + lane;
    if (step < steps) {
#pragma unroll
      for (int i = 0; i < Memory::kLines; ++i) {
        const bool of_x = i < kFewRows;
        const int64_t from = of_x ? row + i : column + i - kFewRows;
        const bool valid = k < end && from < (of_x ? call.rows : call.width);
        copy_number(&staged[step % kStages][i][lane], (of_x ? call.x : call.weight) + (valid ? from * call.in + k : 0),
                    valid);
      }
    }
    end_group();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) load(step);
  const int r = lane / kFewColumns, c = lane % kFewColumns;
  A sum = 0;
  for (int step = 0; step < steps; ++step) {
    wait_for_groups_but<kStages - 2>();
    __syncwarp();
    load(step + kStages - 1);
    const A *a = staged[step % kStages][r], *b = staged[step % kStages][kFewRows + c];
#pragma unroll
    for (int k = 0; k < kStep; k += 4) {
      const auto x = *reinterpret_cast<const Pack<A, 4>*>(a + k), w = *reinterpret_cast<const Pack<A, 4>*>(b + k);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum = fma(x.values[i], w.values[i], sum);
    }
  }
  __shared__ A sums[SumOrder::kMostParts][kWarpSize];
  sums[part][lane] = sum;
  __syncthreads();
  if (part > 0 || row + r >= call.rows || column + c >= call.width) return;
  sum = 0;
  for (int each = 0; each < int(blockDim.x) / kWarpSize; ++each) sum += sums[each][lane];
  sum += bias_of(call, column + c);
  call.out[(row + r) * call.width + column + c] = T(sum);
}

}  // namespace arr_coc
