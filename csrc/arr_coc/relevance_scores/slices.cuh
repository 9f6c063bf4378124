// Reads features once, though salience compares each row with the mean of all: registers hold the rows until the mean
// is known. docs/adr/0039-one-read.md has the reasons.
//
// A cluster takes a slice of one sample's columns; its blocks share the rows, a warp's lanes have a row each. So the
// columns' means are known as soon as the blocks have told each other their sums, and meanwhile the warps compute what
// needs no mean. Shared memory has the next rows.
#pragma once

#include <type_traits>

#include "arr_coc/common/cluster.cuh"
#include "arr_coc/common/held_rows.cuh"
#include "arr_coc/common/rows.cuh"
#include "arr_coc/relevance_scores/scoring.cuh"

namespace arr_coc {

namespace one_read {

constexpr int kWarps = 16, kThreads = kWarps * kWarpSize;
constexpr int kMostBlocks = 8;             // of a cluster
constexpr int kMostTeams = 2;              // of a block
constexpr int kMemory = 227 << 10;         // shared memory of a block
constexpr int kGroupRows = kWarpSize;      // a group: the rows that a warp takes at once, a lane each
constexpr int kSliceBytes = 256;           // of a row
constexpr int kPieces = kSliceBytes / 16;  // of a slice

// Rows [0, count) are cut into `blocks` parts, and these into groups: all of one size, but for the last. A team of
// warps takes a group each; the block's teams take turns.
struct RowCut {
  int count, blocks = 1, block_rows, groups, group_rows, teams;

  // `rows`: 1 to kMostBlocks x kThreads.
  explicit RowCut(int64_t rows) : count(int(rows)) {
    while (blocks < kMostBlocks && count > blocks * kThreads / 2) blocks *= 2;
    block_rows = (count + blocks - 1) / blocks;
    groups = (block_rows + kGroupRows - 1) / kGroupRows;
    group_rows = (block_rows + groups - 1) / groups;
    teams = std::min(kMostTeams, kWarps / groups);
  }
};

template <class T>
struct Call {
  Scoring<T> scoring;
  const T *features, *query;
  float4* parts;                        // [B, slices, N]: a row's top, sum and weighted (OnlineEntropy), its square
  float *along_query, *along_mean;      // [B, slices, N]
  float *query_squares, *mean_squares;  // [B, slices]
  RowCut cut;
  unsigned slices, items;  // an item is a slice of a sample
  int64_t width;
  float scale, each;  // each: what one row counts in the mean
};

template <class T>
constexpr int kColumns = kSliceBytes / sizeof(T);  // of a slice

// The lanes that send a block's sums, four columns each. They store asynchronously, and the barrier counts bytes; but a
// cluster of one block stores as usual, which compute-sanitizer asks for, and its barrier counts these lanes.
template <class T>
constexpr int kSenders = kColumns<T> / 4;

template <class T>
struct Memory {
  // What is not rows: vectors, and less than 1 KiB of barriers.
  static constexpr int kVectors = 2 * kMostTeams * kMostBlocks + 2 * kWarps;
  static constexpr int kSlots = (kMemory - 1024 - kVectors * kColumns<T> * int(sizeof(float))) /
                                (kGroupRows * kSliceBytes) / kMostTeams * kMostTeams;
  alignas(1024) uint4 rows[kSlots][kGroupRows * kPieces];
  float means[kMostTeams][2][kMostBlocks][kColumns<T>];  // the blocks' sums; a team's next exchange may come early
  float sums[kWarps][kColumns<T>], vectors[kWarps][kColumns<T>];  // each warp's sum; its query, and then its mean
  Barrier full[kSlots], exchanged[kMostTeams][2];
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A slice of a sample, and the way to the team's next one.
struct Item {
  unsigned number, sample, slice;

  __device__ Item(unsigned number, unsigned slices) : number(number), sample(number / slices), slice(number % slices) {}

  // `step` is Item(stride, slices).
  __device__ __forceinline__ void advance(const Item& step, unsigned slices) {
    number += step.number, sample += step.sample, slice += step.slice;
    if (slice >= slices) slice -= slices, ++sample;
  }
};

// One warp of a team.
template <class T>
struct Reader {
  static constexpr int kPer = kVector<T>, kMine = kColumns<T> / kWarpSize;

  // A lane's part of a vector.
  struct alignas(kMine * sizeof(float)) Mine {
    float values[kMine];
  };

  const Call<T>& call;
  Memory<T>& memory;
  const int rank, rows, slots, team, group, lane;
  float* const vector;

  __device__ Reader(const Call<T>& call, Memory<T>& memory, int rank, int rows, int team, int group)
      : call(call),
        memory(memory),
        rank(rank),
        rows(rows),
        slots(Memory<T>::kSlots / call.cut.teams),
        team(team),
        group(group),
        lane(threadIdx.x % kWarpSize),
        vector(memory.vectors[threadIdx.x / kWarpSize]) {}

  __device__ __forceinline__ int rows_of(int group) const {
    return max(0, min(call.cut.group_rows, rows - group * call.cut.group_rows));
  }

  // Starts to load a group of an item, if there is one.
  __device__ __forceinline__ void fetch(const Item& item, int group, int slot) const {
    if (item.number >= call.items) return;
    const int half = lane / kPieces, piece = lane % kPieces, count = rows_of(group);
    const int row = rank * call.cut.block_rows + group * call.cut.group_rows + half;
    const T* from = call.features + (int64_t(item.sample) * call.cut.count + row) * call.width +
                    item.slice * kColumns<T> + piece * kPer;
    const uint32_t to = shared_address(memory.rows[slot]) + place(half, piece);
    const int64_t two_rows = 2 * call.width;
    const auto copy = [&](auto whole) {
#pragma unroll
      for (int i = 0; i < kGroupRows / 2; ++i)
        if (decltype(whole)::value || 2 * i + half < count)
          copy_async((to ^ place(2 * i, 0) % kSliceBytes) + 2 * i * kSliceBytes, from + i * two_rows);
    };
    if (count == kGroupRows) {
      copy(std::true_type{});
    } else {
      copy(std::false_type{});
    }
    arrive_after_copies(&memory.full[slot]);
  }

  // The byte of a group at which a piece of a row starts. Neither a row's lanes nor a column's collide in a bank.
  static __device__ __forceinline__ uint32_t place(int row, int piece) {
    return uint32_t(row * kSliceBytes) + (uint32_t(piece ^ (row & 7)) << 4);
  }

  // A piece of the row that starts with `place` of its first piece.
  __device__ __forceinline__ uint4 piece_of(const uint4* group, uint32_t row, int piece) const {
    return *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(group) + (row ^ uint32_t(piece) << 4));
  }

  // The elements of a row's piece, which stays packed in registers.
  static __device__ __forceinline__ void unpack(uint4& raw, float (&values)[kPer]) {
    keep_packed(raw);
    arr_coc::unpack<T>(raw, values);
  }

  struct RowSums {
    float top, sum, weighted, square, along;  // `top`: what powers of two are relative to
  };

  // Calls f(j, x, y) for each element x of a row and the warp's vector's element y in its column; j: the column
  // modulo 4.
  template <class F>
  __device__ __forceinline__ void for_elements(uint4 (&row)[kPieces], const F& f) const {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      float values[kPer];
      unpack(row[k], values);
#pragma unroll
      for (int i = 0; i < kPer; i += 4) {
        const float4 raw = *reinterpret_cast<const float4*>(vector + k * kPer + i);
        f(0, values[i], raw.x), f(1, values[i + 1], raw.y), f(2, values[i + 2], raw.z), f(3, values[i + 3], raw.w);
      }
    }
  }

  // Everything of a row but its product with the mean, with powers of two relative to zero. Sums are taken in parts, so
  // that an addition need not wait for the one before.
  __device__ __forceinline__ RowSums sum_row(uint4 (&row)[kPieces]) const {
    float sums[2] = {}, weighted[2] = {}, square[2] = {}, along[2] = {};
    for_elements(row, [&](int j, float x, float query) {
      const float scaled = x * call.scale, weight = power_of_two(scaled);
      sums[j & 1] += weight;
      weighted[j & 1] = fmaf(weight, scaled, weighted[j & 1]);
      square[j & 1] = fmaf(x, x, square[j & 1]);
      along[j & 1] = fmaf(x, query, along[j & 1]);
    });
    return {0, sums[0] + sums[1], weighted[0] + weighted[1], square[0] + square[1], along[0] + along[1]};
  }

  // The same relative to the largest element. Rare, so that it may take its row from local memory.
  static __device__ __noinline__ RowSums sum_far_row(const uint4* row, const float* vector, float scale) {
    OnlineEntropy<float> entropy;
    float square = 0, along = 0;
#pragma unroll 1
    for (int k = 0; k < kPieces; ++k) {
      uint4 raw = row[k];
      float values[kPer], top = entropy.top;
      unpack(raw, values);
#pragma unroll
      for (int i = 0; i < kPer; ++i) top = max(top, values[i]);  // NaN shows in the sums
      entropy.raise(top, scale);
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        entropy.add(values[i], scale);
        square = fmaf(values[i], values[i], square);
        along = fmaf(values[i], vector[k * kPer + i], along);
      }
    }
    return {entropy.top, entropy.sum, entropy.weighted, square, along};
  }

  __device__ __forceinline__ void write_sums(uint4 (&row)[kPieces], int64_t index) const {
    RowSums sums = sum_row(row);
    // Powers of two near the ends of float's range are inexact, or infinite; and 0 * -inf is NaN.
    if (!(sums.sum > 0x1p-60f && sums.sum < 0x1p60f && isfinite(sums.weighted))) {
      uint4 copy[kPieces];
#pragma unroll
      for (int k = 0; k < kPieces; ++k) copy[k] = row[k];
      sums = sum_far_row(copy, vector, call.scale);
    }
    call.parts[index] = float4{sums.top, sums.sum, sums.weighted, sums.square};
    call.along_query[index] = sums.along;
  }

  // Adds every second of a group's rows to the lane's columns.
  __device__ __forceinline__ void add_columns(const uint4* group, int count, float (&columns)[kPer]) const {
    const int half = lane / kPieces;
    const uint32_t start = place(half, lane % kPieces);
    const auto add = [&](auto whole) {
#pragma unroll
      for (int row = 0; row < kGroupRows; row += 2) {
        if (!decltype(whole)::value && row + half >= count) break;
        float values[kPer];
        uint4 raw = piece_of(group, start + row * kSliceBytes, row & 7);
        unpack(raw, values);
#pragma unroll
        for (int i = 0; i < kPer; ++i) columns[i] += values[i];
      }
    };
    if (count == kGroupRows) {
      add(std::true_type{});
    } else {
      add(std::false_type{});
    }
  }

  // Tells the cluster's blocks the sums of this block's rows. The order of all sums depends on N, D and T alone.
  __device__ __forceinline__ void send(unsigned turn, float (&columns)[kPer]) const {
    float (*sums)[kColumns<T>] = memory.sums + team * call.cut.groups;
    const int threads = call.cut.groups * kWarpSize, which = 1 + team;
#pragma unroll
    for (int i = 0; i < kPer; ++i) columns[i] += __shfl_xor_sync(0xffffffffu, columns[i], kPieces);
    if (lane < kPieces) {
#pragma unroll
      for (int i = 0; i < kPer; ++i) sums[group][lane * kPer + i] = columns[i];
    }
    if (group != 0) return arrive_for_some(which, threads);
    Barrier* exchanged = &memory.exchanged[team][turn % 2];
    const bool alone = call.cut.blocks == 1;
    if (lane == 0 && !alone) expect(exchanged, call.cut.blocks * kColumns<T> * sizeof(float));
    sync_some(which, threads);
    if (lane >= kSenders<T>) return;
    float4 sum{};
    for (int other = 0; other < call.cut.groups; ++other) {
      const float4 one = *reinterpret_cast<const float4*>(&sums[other][lane * 4]);
      sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
    }
    float* mine = &memory.means[team][turn % 2][rank][lane * 4];
    if (alone) {
      *reinterpret_cast<float4*>(mine) = sum;
      return expect(exchanged, 0);
    }
    // This block comes last: a warp that has its sums may write the next ones.
    for (int i = 1; i <= call.cut.blocks; ++i) store_async(mine, exchanged, (rank + i) % call.cut.blocks, sum);
  }

  // Waits for the blocks' sums; the warp's vector becomes the mean. Returns the sum of the lane's squares.
  __device__ __forceinline__ float receive(unsigned turn) const {
    const auto& means = memory.means[team][turn % 2];
    wait(&memory.exchanged[team][turn % 2], turn / 2 % 2);
    Mine mean{};
    float square = 0;
#pragma unroll
    for (int block = 0; block < kMostBlocks; ++block) {
      if (block >= call.cut.blocks) break;
      const Mine one = *reinterpret_cast<const Mine*>(&means[block][lane * kMine]);
#pragma unroll
      for (int i = 0; i < kMine; ++i) mean.values[i] += one.values[i];
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      mean.values[i] *= call.each;
      square = fmaf(mean.values[i], mean.values[i], square);
    }
    *reinterpret_cast<Mine*>(&vector[lane * kMine]) = mean;
    return square;
  }

  __device__ __forceinline__ float along_mean(uint4 (&row)[kPieces]) const {
    float sums[4] = {};
    for_elements(row, [&](int j, float x, float mean) { sums[j] = fmaf(x, mean, sums[j]); });
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  __device__ __forceinline__ void load_query(const Item& item, Mine& query) const {
    const T* from = call.query + item.sample * call.width + item.slice * kColumns<T> + lane * kMine;
#pragma unroll
    for (int i = 0; i < kMine; ++i) query.values[i] = item.number < call.items ? float(from[i]) : 0.0f;
  }

  __device__ void run() const {
    const RowCut& cut = call.cut;
    const unsigned clusters = gridDim.x / cut.blocks;
    const Item step(clusters * cut.teams, call.slices);
    Item item(blockIdx.x / cut.blocks + team * clusters, call.slices), next = item, ahead = item;
    for (int stage = group; stage < slots; stage += cut.groups, ahead.advance(step, call.slices))
      fetch(ahead, group, team * slots + stage);
    // The team's groups go through its slots in turn: this warp's slot goes to one certain group of a later item.
    ahead = item;
    for (int i = 0; i < (slots + group) / cut.groups; ++i) ahead.advance(step, call.slices);
    const int group_ahead = (slots + group) % cut.groups, count = rows_of(group);
    const int64_t place_of_row = rank * cut.block_rows + group * cut.group_rows + lane;
    Mine query;
    load_query(item, query);
    int slot = group;
    unsigned phase = 0;
    for (unsigned turn = 0; item.number < call.items; ++turn) {
      const int64_t index = int64_t(item.number) * cut.count + place_of_row;
      uint4 row[kPieces];
      float columns[kPer] = {}, square = 0;
      // A phase is told from the one before it, but not from the one before that. That one ended long ago: no warp gets
      // here before the whole team has read its last groups.
      wait(&memory.full[team * slots + slot], phase);
#pragma unroll
      for (int k = 0; k < kPieces; ++k) row[k] = piece_of(memory.rows[team * slots + slot], place(lane, 0), k);
      add_columns(memory.rows[team * slots + slot], count, columns);
      __syncwarp();
      fetch(ahead, group_ahead, team * slots + slot);
      send(turn, columns);
      *reinterpret_cast<Mine*>(&vector[lane * kMine]) = query;
#pragma unroll
      for (int i = 0; i < kMine; ++i) square = fmaf(query.values[i], query.values[i], square);
      __syncwarp();
      const bool tells = rank == 0 && group == 0;
      if (tells && (square = warp_sum(square), lane == 0)) call.query_squares[item.number] = square;
      next.advance(step, call.slices);
      load_query(next, query);
      if (lane < count) write_sums(row, index);
      __syncwarp();
      square = receive(turn);
      __syncwarp();
      if (tells && (square = warp_sum(square), lane == 0)) call.mean_squares[item.number] = square;
      const float product = along_mean(row);
      if (lane < count) call.along_mean[index] = product;
      __syncwarp();
      item = next, ahead.advance(step, call.slices);
      if ((slot += cut.groups) >= slots) slot -= slots, phase ^= 1;
    }
  }
};

#endif

// A cluster's teams take one item after the other.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) slices_kernel(const Call<T> call) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(1024) char bytes[];
  auto& memory = *reinterpret_cast<Memory<T>*>(bytes);
  let_later_kernel_start();
  const int blocks = call.cut.blocks, rank = int(rank_in_cluster());
  const int rows = max(0, min(call.cut.block_rows, call.cut.count - rank * call.cut.block_rows));
  if (threadIdx.x == 0) {
    for (Barrier& full : memory.full) start_barrier(&full, kWarpSize);
    for (auto& exchanged : memory.exchanged)
      for (Barrier& of_turn : exchanged) start_barrier(&of_turn, blocks == 1 ? kSenders<T> : 1);
    publish_barriers();
  }
  __syncthreads();
  sync_cluster();
  const int warp = threadIdx.x / kWarpSize, team = warp / call.cut.groups;
  if (team < call.cut.teams) Reader<T>(call, memory, rank, rows, team, warp % call.cut.groups).run();
  __syncwarp();
  sync_cluster();  // no block ends while others may still write to its memory
#endif
}

}  // namespace one_read

}  // namespace arr_coc
