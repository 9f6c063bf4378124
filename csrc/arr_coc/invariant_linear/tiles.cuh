// The product in tiles of `out`: a block computes a tile, a thread some rows and columns of it in registers.
#pragma once

#include <cstring>
#include <type_traits>

#include "arr_coc/common/cluster.cuh"
#include "arr_coc/invariant_linear/few_rows.cuh"

namespace arr_coc {

// A tile, and how it is divided among threads.
template <int kRows_, int kColumns_, int kThreadRows_, int kThreadColumns_, int kTwins_, int kStages_, int kBlocks_>
struct Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kThreadRows = kThreadRows_, kThreadColumns = kThreadColumns_;
  static constexpr int kDown = kRows / kThreadRows, kAcross = kColumns / kThreadColumns;  // threads
  static constexpr int kThreads = kDown * kAcross;
  static constexpr int kTwins = kTwins_;    // neighbouring lanes that are one above the other
  static constexpr int kStages = kStages_;  // steps of the sum in shared memory
  static constexpr int kBlocks = kBlocks_;  // that a multiprocessor shall hold, of 4-byte numbers
  static constexpr int kStep = SumOrder::kStep;
  // A step's rows, then its weights, each number of the sum a line. Loading, 8 neighbouring threads store numbers of 8
  // lines; 4 more in a line put them in different banks.
  static constexpr int kRowsLine = kRows + 4, kColumnsLine = kColumns + 4;
  static constexpr int kStage = kStep * (kRowsLine + kColumnsLine);
  static_assert(kThreads % kWarpSize == 0 && kDown % 4 == 0 && kAcross % 8 == 0 && kThreadRows % 4 == 0);
  static_assert(kThreadColumns % 4 == 0 && kStep % 8 == 0 && kRows % (kThreads / 8) == 0);
  static_assert(kColumns % (kThreads / 8) == 0);

  // Also a tile of sums that the blocks of a cluster show one another.
  template <class A>
  static constexpr int kBytes = int(sizeof(A)) * std::max(kStages * kStage, kRows* kColumns);
};

// 8 x 8 numbers a thread keep the multiplying units busy; 64 x 64 are more blocks where there is less to do. A warp is
// 4 x 8 threads. Twins spare the small tile reads of shared memory, of which it has more; the large one is faster
// without.
using LargeTile = Tile<128, 128, 8, 8, 1, 3, 2>;
using SmallTile = Tile<64, 64, 8, 4, 2, 4, 4>;

// A thread's rows and columns are groups of four neighbours, all the threads' fours apart. These are the first ones.
template <class Form>
struct ThreadPlace {
  int row, column;

  __device__ ThreadPlace() {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    constexpr int kWarpsAcross = Form::kAcross / 8;
    row = (warp / kWarpsAcross * 4 + lane / (8 * Form::kTwins) * Form::kTwins + lane % Form::kTwins) * 4;
    column = (warp % kWarpsAcross * 8 + lane / Form::kTwins % 8) * 4;
  }
};

// Whether rows of `out` can be written four numbers at a time.
template <class T>
__device__ __forceinline__ bool stores_fours(const InvariantLinear<T>& call) {
  return call.width % 4 == 0 && reinterpret_cast<uintptr_t>(call.out) % 16 == 0;
}

// Stores four neighbouring numbers; `whole`: at once, by a function that the compiler does not take apart again.
template <class T>
__device__ __forceinline__ void store_four(const InvariantLinear<T>& call, int64_t row, int64_t column,
                                           const Pack<accumulate_t<T>, 4>& numbers, bool whole) {
  using Piece = std::conditional_t<sizeof(T) == 2, uint2, uint4>;
  T stored[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) stored[i] = T(numbers.values[i]);
  T* out = call.out + row * call.width + column;
  if (whole) {
    if (column >= call.width) return;
    Piece pieces[sizeof(stored) / sizeof(Piece)];
    memcpy(pieces, stored, sizeof(stored));
#pragma unroll
    for (int i = 0; i < int(sizeof(stored) / sizeof(Piece)); ++i) __stcg(reinterpret_cast<Piece*>(out) + i, pieces[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < call.width) out[i] = stored[i];
  }
}

// Brings the steps of a sum to shared memory, in turn to each stage.
template <class Form, class T>
class Loader {
  using A = accumulate_t<T>;
  static constexpr int kTogether = Form::kThreads / 8;  // lines of x or weight that the threads load at once

 public:
  __device__ Loader(const InvariantLinear<T>& call, A* memory, int64_t row, int64_t column, int64_t begin, int64_t end)
      : memory_(memory),
        x_(call.x + (row + first_) * call.in + begin + place_),
        weight_(call.weight + (column + first_) * call.in + begin + place_),
        lines_(kTogether * call.in),
        left_(end - begin),
        rows_(int(min(call.rows - row, int64_t(Form::kRows)))),
        columns_(int(min(call.width - column, int64_t(Form::kColumns)))) {}

  // Starts to load the next step, if there is one.
  __device__ __forceinline__ void load_next() {
    if (left_ > 0) {
      const bool whole = rows_ == Form::kRows && columns_ == Form::kColumns && left_ >= Form::kStep;
      whole ? load<true>() : load<false>();
      x_ += Form::kStep, weight_ += Form::kStep, left_ -= Form::kStep;
      stage_ = stage_ == (Form::kStages - 1) * Form::kStage ? 0 : stage_ + Form::kStage;
    }
    end_group();
  }

 private:
  template <bool kWhole>
  __device__ __forceinline__ void load() {
    A* const stage = memory_ + stage_ + first_;
    load_lines<kWhole, Form::kRows, Form::kRowsLine>(stage, x_, rows_);
    load_lines<kWhole, Form::kColumns, Form::kColumnsLine>(stage + Form::kStep * Form::kRowsLine, weight_, columns_);
  }

  // The thread's numbers of `valid` lines, and zeros for the others and past the end.
  template <bool kWhole, int kLines, int kStride>
  __device__ __forceinline__ void load_lines(A* to, const T* from, int valid) {
#pragma unroll
    for (int line = 0; line < kLines; line += kTogether, from += lines_)
#pragma unroll
      for (int k = 0; k < Form::kStep; k += 8)
        copy_number(to + (k + place_) * kStride + line, from + k,
                    kWhole || (first_ + line < valid && k + place_ < left_));
  }

  const int first_ = threadIdx.x / 8, place_ = threadIdx.x % 8;
  A* const memory_;
  const T *x_, *weight_;
  const int64_t lines_;  // from one line of a thread to its next
  int64_t left_;
  const int rows_, columns_;
  int stage_ = 0;
};

// A thread's sums, and the numbers of the sum's next product.
template <class Form, class A>
class Sums {
  static constexpr int kDown = Form::kThreadRows, kAcross = Form::kThreadColumns;

 public:
  // Fetches the k-th numbers of a step for its multiply(k).
  __device__ __forceinline__ void fetch(const A* stage, int k) {
    const A* rows = stage + k * Form::kRowsLine + place_.row;
    const A* columns = stage + Form::kStep * Form::kRowsLine + k * Form::kColumnsLine + place_.column;
#pragma unroll
    for (int i = 0; i < kDown; i += 4) put_four(&x_[k % 2][i], rows + i * Form::kDown);
#pragma unroll
    for (int j = 0; j < kAcross; j += 4) put_four(&weight_[k % 2][j], columns + j * Form::kAcross);
  }

  // To and fro, so that each product has a number of the one before it, which is still at the multiplier.
  __device__ __forceinline__ void multiply(int k) {
#pragma unroll
    for (int i = 0; i < kDown; ++i)
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
        const int j = i % 2 ? kAcross - 1 - n : n;
        part_[i][j] = fma(x_[k % 2][i], weight_[k % 2][j], part_[i][j]);
      }
  }

  // Earlier parts are zero at first, and never just a part: sums that are stored as they are come to lie in
  // neighbouring registers, and then most products read two numbers of one register bank.
  __device__ __forceinline__ void start_parts() {
#pragma unroll
    for (int i = 0; i < kDown; ++i)
#pragma unroll
      for (int j = 0; j < kAcross; ++j) earlier_[i][j] = 0;
  }

  // Adds this part of the sums to the earlier ones, and starts the next.
  __device__ __forceinline__ void end_part() {
#pragma unroll
    for (int i = 0; i < kDown; ++i)
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        earlier_[i][j] = earlier_[i][j] + part_[i][j];
        part_[i][j] = 0;
      }
  }

  // Adds the earlier parts to the last one.
  __device__ __forceinline__ void end_last_part() {
#pragma unroll
    for (int i = 0; i < kDown; ++i)
#pragma unroll
      for (int j = 0; j < kAcross; ++j) part_[i][j] = earlier_[i][j] + part_[i][j];
  }

  // Calls f(row, column, numbers) for each four neighbours of the tile, with bias_of(column) added.
  template <class Bias, class F>
  __device__ __forceinline__ void for_fours(const Bias& bias_of, const F& f) const {
    A bias[kAcross];
#pragma unroll
    for (int j = 0; j < kAcross; ++j) bias[j] = bias_of(place_.column + j / 4 * 4 * Form::kAcross + j % 4);
#pragma unroll
    for (int i = 0; i < kDown; ++i)
#pragma unroll
      for (int j = 0; j < kAcross; j += 4) {
        Pack<A, 4> four;
#pragma unroll
        for (int n = 0; n < 4; ++n) four.values[n] = part_[i][j + n] + bias[j + n];
        f(place_.row + i / 4 * 4 * Form::kDown + i % 4, place_.column + j * Form::kAcross, four);
      }
  }

 private:
  static __device__ __forceinline__ void put_four(A* to, const A* from) {
    const auto four = *reinterpret_cast<const Pack<A, 4>*>(from);
#pragma unroll
    for (int n = 0; n < 4; ++n) to[n] = four.values[n];
  }

  ThreadPlace<Form> place_;
  A part_[kDown][kAcross] = {}, x_[2][kDown], weight_[2][kAcross];
  volatile A earlier_[kDown][kAcross];  // in memory, so that no loop has to keep registers for it
};

// A tile that a block computes, and the part of the sums that is its share.
template <class Form, class T>
struct Work {
  using A = accumulate_t<T>;
  const InvariantLinear<T>& call;
  A* const memory;
  const unsigned sharers, part;
  int64_t row, column, begin, end;

  __device__ Work(const InvariantLinear<T>& call, void* memory, unsigned sharers)
      : call(call), memory(static_cast<A*>(memory)), sharers(sharers), part(blockIdx.x % sharers) {
    const unsigned across = unsigned((call.width + Form::kColumns - 1) / Form::kColumns), tile = blockIdx.x / sharers;
    row = int64_t(tile / across) * Form::kRows, column = int64_t(tile % across) * Form::kColumns;
    begin = part * call.order.part_length;
    end = sharers > 1 ? min(begin + call.order.part_length, call.in) : call.in;
  }

  __device__ int steps() const { return int((end - begin + Form::kStep - 1) / Form::kStep); }

  // Adds up the share.
  template <bool kParts>
  __device__ __forceinline__ void add_up(Sums<Form, A>& sums) const {
    Loader<Form, T> loader(call, memory, row, column, begin, end);
#pragma unroll
    for (int step = 0; step < Form::kStages - 1; ++step) loader.load_next();
    const int count = steps(), of_part = int(call.order.part_length / Form::kStep);
    const A* stage = memory;
    const auto wait = [] {
      wait_for_groups_but<Form::kStages - 2>();
      __syncthreads();
    };
    if (kParts && of_part < count) sums.start_parts();
    wait();
    sums.fetch(stage, 0);
    for (int begin = 0; begin < count; begin += of_part) {
      if (kParts && begin > 0) sums.end_part();
      for (int step = begin; step < min(begin + of_part, count); ++step) {
        loader.load_next();
#pragma unroll
        for (int k = 0; k < Form::kStep; ++k) {
          if (k == Form::kStep - 1) {
            wait();
            stage = stage == memory + (Form::kStages - 1) * Form::kStage ? memory : stage + Form::kStage;
          }
          sums.fetch(stage, (k + 1) % Form::kStep);
          sums.multiply(k);
        }
      }
    }
  }

  __device__ __forceinline__ void store(int64_t down, int64_t across, const Pack<A, 4>& four, bool whole) const {
    if (row + down < call.rows) store_four(call, row + down, column + across, four, whole);
  }
};

// One block a tile.
template <class Form, class T>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks * 4 / sizeof(accumulate_t<T>))
    tile_kernel(InvariantLinear<T> call) {
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) char bytes[];
  const Work<Form, T> work(call, bytes, 1);
  Sums<Form, A> sums;
  work.template add_up<true>(sums);
  if (work.end > call.order.part_length) sums.end_last_part();
  const auto bias = [&](int across) { return bias_of(call, work.column + across); };
  const bool whole = stores_fours(call);
  sums.for_fours(bias, [&](int down, int across, const Pack<A, 4>& four) { work.store(down, across, four, whole); });
}

// One cluster a tile, one of its blocks a part of the sums. They show one another their parts; each adds some of them.
template <class Form, class T>
__global__ void __launch_bounds__(Form::kThreads, Form::kBlocks * 4 / sizeof(accumulate_t<T>))
    shared_tile_kernel(InvariantLinear<T> call) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using A = accumulate_t<T>;
  extern __shared__ __align__(16) char bytes[];
  const Work<Form, T> work(call, bytes, blocks_in_cluster());
  Sums<Form, A> sums;
  work.template add_up<false>(sums);
  __syncthreads();  // nobody reads the stages any more
  sums.for_fours([](int) { return A(0); },
                 [&](int down, int across, const Pack<A, 4>& four) {
                   *reinterpret_cast<Pack<A, 4>*>(work.memory + down * Form::kColumns + across) = four;
                 });
  sync_cluster();
  const bool whole = stores_fours(call);
  for (int at = (work.part * Form::kThreads + threadIdx.x) * 4; at < Form::kRows * Form::kColumns;
       at += work.sharers * Form::kThreads * 4) {
    Pack<A, 4> total = {};
    for (unsigned part = 0; part < work.sharers; ++part) {
      const auto more = *reinterpret_cast<const Pack<A, 4>*>(in_block(work.memory + at, part));
#pragma unroll
      for (int n = 0; n < 4; ++n) total.values[n] += more.values[n];
    }
    const int down = at / Form::kColumns, across = at % Form::kColumns;
#pragma unroll
    for (int n = 0; n < 4; ++n) total.values[n] += bias_of(call, work.column + across + n);
    work.store(down, across, total, whole);
  }
  sync_cluster();  // the others have read this block's part
#endif
}

}  // namespace arr_coc
