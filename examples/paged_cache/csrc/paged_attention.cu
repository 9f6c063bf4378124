// Attention of one token over a context that lies in blocks, limited by the time to read keys and values once.
//
// A block of threads reads kPartition tokens of one head's keys and values, and serves all queries that share them; the
// partitions are then combined. Their bounds depend on nothing but the position in a context, so a sample's answer has
// the same bits beside any others.
#include "common.cuh"
#include "paged_attention.h"

namespace paged_cache {
namespace {

constexpr int kWarp = 32, kWarps = 4, kThreads = kWarps * kWarp, kUnrolled = 4;
constexpr int64_t kPartition = 256;

template <class T>
constexpr int kVector = 16 / sizeof(T);

__device__ __forceinline__ float power_of_two(float x) { return exp2f(x); }
__device__ __forceinline__ double power_of_two(double x) { return exp2(x); }

// 2^(x - highest), and 0 for -inf, also where all are -inf.
template <class A>
__device__ __forceinline__ A weight(A x, A highest) {
  return x == A(-INFINITY) ? A(0) : power_of_two(x - highest);
}

// The call, and where the partitions' results go: sums [B, Q, partitions, D], and for each its highest score and total.
template <class T>
struct Partitions {
  using A = accumulate_t<T>;
  PagedAttention<T> call;
  A *sums = nullptr, *highest = nullptr, *totals = nullptr;
  int64_t count = 1;
  int chunks = 1, lanes = 1;  // parts of a group of heads; lanes that read one row
  bool aligned = false;
};

// row[at, at + kVector) of D elements as they lie in memory; zeros from D on.
template <class T>
__device__ __forceinline__ uint4 load(const T* row, int at, int width, bool aligned) {
  uint4 raw = {0, 0, 0, 0};
  if (aligned) {
    if (at < width) raw = __ldg(reinterpret_cast<const uint4*>(row + at));
    return raw;
  }
  T values[kVector<T>];
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) values[i] = at + i < width ? row[at + i] : T(0.f);
  memcpy(&raw, values, sizeof(raw));
  return raw;
}

template <class T, class A>
__device__ __forceinline__ void unpack(const uint4& raw, A (&values)[kVector<T>]) {
  T packed[kVector<T>];
  memcpy(packed, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) values[i] = A(packed[i]);
}

// What some lanes know of a query: its highest score so far, and sums of weights and of weighted values. Scores are
// logarithms to base 2.
template <class A, int kSize>
struct Running {
  A highest = -INFINITY, total = 0, sums[kSize] = {};

  __device__ __forceinline__ void raise(A to) {
    const A factor = weight(highest, to);
    highest = to;
    total *= factor;
#pragma unroll
    for (A& sum : sums) sum *= factor;
  }
};

template <class T, int kHeads, int kVectors>
struct Reader {
  using A = accumulate_t<T>;
  static constexpr int kSize = kVectors * kVector<T>;

  const Partitions<T>& all;
  int64_t sample, kv_head, first_head;
  int heads, lane, group;  // the heads of this part; the lane within those of a row, and which row they read
  A query[kHeads][kSize];
  Running<A, kSize> running[kHeads];

  __device__ Reader(const Partitions<T>& partitions, int64_t part) : all(partitions) {
    const PagedAttention<T>& call = all.call;
    const int64_t of_group = part % all.chunks * kHeads;
    sample = part / all.chunks / call.kv_heads;
    kv_head = part / all.chunks % call.kv_heads;
    first_head = kv_head * call.group() + of_group;
    heads = int(min(int64_t(kHeads), call.group() - of_group));
    lane = threadIdx.x % kWarp % all.lanes;
    group = threadIdx.x % kWarp / all.lanes;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int at = place(i);
        const bool counts = h < heads && at < call.width;
        const T* from = call.q + (sample * call.heads + first_head + h) * call.width;
        query[h][i] = counts ? A(from[at]) * call.scale * A(1.4426950408889634) : A(0);
      }
    }
  }

  // Where element i of a lane is in a row.
  __device__ __forceinline__ int place(int i) const {
    return (i / kVector<T> * all.lanes + lane) * kVector<T> + i % kVector<T>;
  }

  __device__ void read(int64_t begin, int64_t end) {
    const int rows = kWarp / all.lanes, step = kWarps * rows;
    for (int64_t base = begin + threadIdx.x / kWarp * rows; base < end; base += step * kUnrolled) {
      uint4 keys[kUnrolled][kVectors], values[kUnrolled][kVectors];
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) fetch(base + u * step + group, end, keys[u], values[u]);
      A scores[kHeads][kUnrolled];
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) score(keys[u], base + u * step + group < end, u, scores);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        A highest = running[h].highest;
#pragma unroll
        for (int u = 0; u < kUnrolled; ++u) highest = max(highest, scores[h][u]);
        running[h].raise(highest);
      }
#pragma unroll
      for (int u = 0; u < kUnrolled; ++u) add(values[u], u, scores);
    }
  }

  __device__ __forceinline__ void fetch(int64_t t, int64_t end, uint4 (&keys)[kVectors], uint4 (&values)[kVectors]) {
    const PagedAttention<T>& call = all.call;
    if (t >= end) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) keys[i] = values[i] = {0, 0, 0, 0};
      return;
    }
    const int64_t entry = t / call.size, at = t - entry * call.size, block = call.tables[sample * call.table + entry];
    if (block < 0 || block >= call.blocks) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) keys[i] = {~0u, ~0u, ~0u, ~0u}, values[i] = {0, 0, 0, 0};  // NaN
      return;
    }
    const T *key = call.keys.row(block, at, kv_head), *value = call.values.row(block, at, kv_head);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) keys[i] = load(key, place(i * kVector<T>), int(call.width), all.aligned);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) values[i] = load(value, place(i * kVector<T>), int(call.width), all.aligned);
  }

  __device__ __forceinline__ void score(const uint4 (&raw)[kVectors], bool counts, int u,
                                        A (&scores)[kHeads][kUnrolled]) {
    A sums[kHeads] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A key[kVector<T>];
      unpack<T>(raw[i], key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int j = 0; j < kVector<T>; ++j) sums[h] += query[h][i * kVector<T> + j] * key[j];
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      for (int offset = all.lanes / 2; offset > 0; offset /= 2)
        sums[h] += __shfl_xor_sync(0xffffffffu, sums[h], offset);
      scores[h][u] = counts ? sums[h] : A(-INFINITY);
    }
  }

  __device__ __forceinline__ void add(const uint4 (&raw)[kVectors], int u, const A (&scores)[kHeads][kUnrolled]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      A value[kVector<T>];
      unpack<T>(raw[i], value);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const A factor = weight(scores[h][u], running[h].highest);
        if (i == 0) running[h].total += factor;
#pragma unroll
        for (int j = 0; j < kVector<T>; ++j) running[h].sums[i * kVector<T> + j] += factor * value[j];
      }
    }
  }

  // Brings together what the rows of a warp have found.
  __device__ void join_rows() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      for (int offset = all.lanes; offset < kWarp; offset *= 2) {
        Running<A, kSize>& own = running[h];
        own.raise(max(own.highest, __shfl_xor_sync(0xffffffffu, own.highest, offset)));
        own.total += __shfl_xor_sync(0xffffffffu, own.total, offset);
#pragma unroll
        for (A& sum : own.sums) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
    }
  }
};

template <class A, int kHeads, int kSize>
struct OfWarps {
  A highest[kWarps][kHeads], totals[kWarps][kHeads], sums[kWarps][kHeads][kSize * kWarp];
};

template <class T, int kHeads, int kVectors>
__global__ void __launch_bounds__(kThreads) partition_kernel(const Partitions<T> all, int64_t work) {
  using A = accumulate_t<T>;
  using One = Reader<T, kHeads, kVectors>;
  __shared__ OfWarps<A, kHeads, One::kSize> shared;
  const PagedAttention<T>& call = all.call;
  const int warp = threadIdx.x / kWarp;
  for (int64_t item = blockIdx.x; item < work; item += gridDim.x) {
    const int64_t partition = item % all.count, begin = partition * kPartition;
    One reader(all, item / all.count);
    const int64_t length = call.lengths[reader.sample];
    if ((begin >= length || !call.has_room(length)) && all.count > 1) continue;
    reader.read(begin, call.has_room(length) ? min(length, begin + kPartition) : 0);
    reader.join_rows();
    if (reader.group == 0) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        shared.highest[warp][h] = reader.running[h].highest;
        shared.totals[warp][h] = reader.running[h].total;
#pragma unroll
        for (int i = 0; i < One::kSize; ++i) shared.sums[warp][h][reader.place(i)] = reader.running[h].sums[i];
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < reader.heads * call.width; at += kThreads) {
      const int h = at / int(call.width), d = at % int(call.width);
      Running<A, 1> whole;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) whole.highest = max(whole.highest, shared.highest[w][h]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const A factor = weight(shared.highest[w][h], whole.highest);
        whole.total += factor * shared.totals[w][h];
        whole.sums[0] += factor * shared.sums[w][h][d];
      }
      const int64_t head = reader.sample * call.heads + reader.first_head + h;
      if (all.count == 1) {
        call.out[head * call.width + d] = call.result(length, whole.sums[0], whole.total);
        continue;
      }
      all.sums[(head * all.count + partition) * call.width + d] = whole.sums[0];
      if (d == 0) {
        all.highest[head * all.count + partition] = whole.highest;
        all.totals[head * all.count + partition] = whole.total;
      }
    }
    __syncthreads();  // the next item writes `shared`
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) combine_kernel(const Partitions<T> all) {
  using A = accumulate_t<T>;
  const PagedAttention<T>& call = all.call;
  for (int64_t head = blockIdx.x; head < call.batch * call.heads; head += gridDim.x) {
    const int64_t length = call.lengths[head / call.heads], first = head * all.count;
    const int64_t used = call.has_room(length) ? (length + kPartition - 1) / kPartition : 0;
    A highest = -INFINITY;
    for (int64_t p = 0; p < used; ++p) highest = max(highest, all.highest[first + p]);
    for (int d = threadIdx.x; d < call.width; d += kThreads) {
      A total = 0, sum = 0;
      for (int64_t p = 0; p < used; ++p) {
        const A factor = weight(all.highest[first + p], highest);
        total += factor * all.totals[first + p];
        sum += factor * all.sums[(first + p) * call.width + d];
      }
      call.out[head * call.width + d] = call.result(length, sum, total);
    }
  }
}

template <int kHeads, int kVectors, class T>
void launch(const Cuda& device, Partitions<T> all) {
  const PagedAttention<T>& call = all.call;
  all.chunks = int((call.group() + kHeads - 1) / kHeads);
  const int64_t work = call.batch * call.kv_heads * all.chunks * all.count;
  partition_kernel<T, kHeads, kVectors><<<blocks_for(work, 1), kThreads, 0, device.stream()>>>(all, work);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// The kernel for so many queries a head: few, so that their sums fit the registers, and keys are read again if more.
template <class T>
void launch_for_group(const Cuda& device, const Partitions<T>& all, int vectors) {
  if constexpr (std::is_same_v<T, double>) {
    launch<2, 4>(device, all);
  } else {
    if (std::is_same_v<T, float> && vectors > 1) return launch<4, sizeof(T) == 4 ? 2 : 1>(device, all);
    const int64_t group = all.call.group();
    if (group == 1) return launch<1, 1>(device, all);
    if (group == 2) return launch<2, 1>(device, all);
    if (group <= 4) return launch<4, 1>(device, all);
    launch<8, 1>(device, all);
  }
}

}  // namespace

template <class T>
void run(const Cuda& device, const PagedAttention<T>& call, const Tensor& like) {
  using A = accumulate_t<T>;
  constexpr int64_t bytes = sizeof(T);
  Partitions<T> all{call};
  all.count = std::max<int64_t>(1, (call.table * call.size + kPartition - 1) / kPartition);
  const int vectors = int((call.width + kVector<T> - 1) / kVector<T>);
  for (all.lanes = 1; all.lanes < std::min(vectors, kWarp);) all.lanes *= 2;
  const auto aligned = [&](const Cache<T>& cache) {
    return has_whole_vectors(cache.data, bytes, {call.width, cache.block, cache.place, cache.head});
  };
  all.aligned = aligned(call.keys) && aligned(call.values);
  if (all.count == 1) return launch_for_group(device, all, (vectors + kWarp - 1) / kWarp);
  const int64_t results = call.batch * call.heads * all.count;
  const Tensor scratch =
      torch::stable::new_empty(like, {results * (call.width + 2) * int64_t(sizeof(A))}, ScalarType::Byte);
  all.sums = reinterpret_cast<A*>(scratch.mutable_data_ptr());
  all.highest = all.sums + results * call.width;
  all.totals = all.highest + results;
  launch_for_group(device, all, (vectors + kWarp - 1) / kWarp);
  combine_kernel<T><<<blocks_for(call.batch * call.heads, 1), kThreads, 0, device.stream()>>>(all);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

STABLE_TORCH_LIBRARY_IMPL(paged_cache, CUDA, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention<Cuda>)); }

}  // namespace paged_cache
