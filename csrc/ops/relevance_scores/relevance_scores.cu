#include <torch/csrc/stable/library.h>

#include "common/alignment.cuh"
#include "common/mean_unit.cuh"
#include "common/rows.cuh"
#include "ops/relevance_scores/relevance_scores.h"

namespace arr_coc {
namespace {

// See relevance_scores.cpp for the formulas.

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// Where the query's unit vector is not kept in shared memory: several tokens, or more bytes than this.
constexpr int64_t kQueryBytes = 1 << 15;

template <class T>
struct Call {
  using A = accumulate_t<T>;
  const T *features, *query, *colours, *edges, *weights;
  const bool* mask;    // of the one token, or null
  const A* alignment;  // given where not computed here
  T* out;
  A *base, *inverse, *partial;  // what the second read of the features needs, and column sums of chunks
  int64_t batch, rows, columns, width, weight_stride;  // the grid of patches is rows x columns
  int warp_rows;                                       // a block takes kWarps times as many rows of one sample
  int64_t chunks;
  A scale, entropy_norm, edge_weight, contrast_weight, features_weight;
  bool invert;

  __host__ __device__ int64_t count() const { return rows * columns; }
};

// Distance of patch n's colour to that of one of the 8 patches around it, counted row by row; 0 where there is none.
template <class T>
__device__ __forceinline__ accumulate_t<T> neighbour_distance(const Call<T>& call, const T* colours, int64_t row,
                                                              int64_t column, int which) {
  using A = accumulate_t<T>;
  const int around = which < 4 ? which : which + 1;
  const int64_t i = row + around / 3 - 1, j = column + around % 3 - 1;
  if (which >= 8 || i < 0 || i >= call.rows || j < 0 || j >= call.columns) return 0;
  A square = 0;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const T* channel = colours + c * call.count();
    const A difference = A(channel[row * call.columns + column]) - A(channel[i * call.columns + j]);
    square += difference * difference;
  }
  return sqrt(square);
}

template <class A>
__device__ __forceinline__ A clamped(A raw) {
  return raw < 0 ? A(0) : raw > 1 ? A(1) : raw;  // NaN stays, as in torch.clamp
}

// A block a chunk, a warp a row at a time. Query: the alignment is computed here, with the unit vector of one token in
// shared memory. Columns: the chunk's column sums are taken as well, for which a row must fit a tile. Where a second
// read follows, what it needs is left in `base` and `inverse`.
template <bool Aligned, bool Query, bool Columns, class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1
                                            : Columns      ? 2
                                                           : 3) rows_kernel(const Call<T> call) {
  using A = accumulate_t<T>;
  using Vector = SharedVector<T, A>;
  constexpr int kPer = kPerLane<T>;
  extern __shared__ uint4 memory[];
  __shared__ A shared[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t count = call.count(), width = call.width;
  const Vector query{reinterpret_cast<A*>(memory)};
  for (int64_t item = blockIdx.x; item < call.batch * call.chunks; item += gridDim.x) {
    const int64_t sample = item / call.chunks, first = (item % call.chunks * kWarps + warp) * call.warp_rows;
    const int64_t last = min(first + call.warp_rows, count);
    const T* weights = call.weights + sample * call.weight_stride;
    const A w_entropy = A(weights[0]), w_salience = A(weights[1]), w_alignment = A(weights[2]);
    const A w_sum = w_entropy + w_salience + w_alignment;
    if constexpr (Query) {
      const T* token = call.query + sample * width;
      const bool kept = !call.mask || call.mask[sample];
      A square = 0;
      __syncthreads();  // the last chunk is done with it
      for (int64_t d = threadIdx.x; d < width; d += kThreads) {
        const A x = kept ? A(token[d]) : A(0);
        query[d] = x;
        square += x * x;
      }
      const A inverse = inverse_norm(sqrt(block_sum(square, shared)));
      for (int64_t d = threadIdx.x; d < width; d += kThreads) query[d] *= inverse;
      __syncthreads();
    }
    [[maybe_unused]] A columns[kPieces<T>][kPer] = {};
    int64_t row = first / call.columns, column = first % call.columns;
    for (int64_t n = first; n < last; ++n) {
      const T* x = call.features + (sample * count + n) * width;
      OnlineEntropy<A> entropy;
      A square = 0, product = 0;
      A distance = 0;
      for (int64_t start = 0; start < width; start += kTile<T>) {
        const int size = RowTile<T>::size(start, width);
        RowTile<T> tile;
        tile.template load<Aligned>(x + start, size);
        if (start == 0) distance = neighbour_distance(call, call.colours + sample * 3 * count, row, column, lane);
        entropy.template prepare<Aligned>(tile, size, call.scale);
        tile.template for_pieces<Aligned, A>(size, [&](int k, const auto& values, int inside) {
          [[maybe_unused]] A token[kPer];
          if constexpr (Query) query.load(start, k, token);
#pragma unroll
          for (int i = 0; i < kPer; ++i) {
            if (i >= inside) continue;
            entropy.add(values[i], call.scale);
            square += values[i] * values[i];
            if constexpr (Query) product += values[i] * token[i];
            if constexpr (Columns) columns[k][i] += values[i];
          }
        });
      }
      entropy.over_warp();
      square = warp_sum(square);
      if constexpr (Query) product = warp_sum(product);
      distance = warp_sum(distance);
      if (lane == 0) {
        const int64_t at = sample * count + n;
        const int64_t neighbours = (min(row + 1, call.rows - 1) - max(row - 1, int64_t(0)) + 1) *
                                       (min(column + 1, call.columns - 1) - max(column - 1, int64_t(0)) + 1) -
                                   1;
        if (neighbours > 0) distance /= A(neighbours);
        const A edge = A(call.edges[at]), h = entropy.bits() * call.entropy_norm;
        const A inverse = inverse_norm(sqrt(square));
        A alignment;
        if constexpr (Query) {
          alignment = call.mask && !call.mask[sample] ? A(0) : (1 + product * inverse) / 2;
        } else {
          alignment = call.alignment[at];
        }
        const A stands_out = call.edge_weight * (edge / (edge + A(kEdgeHalf))) +
                             call.contrast_weight * (distance / (distance + A(kContrastHalf)));
        const A raw =
            (w_entropy * (call.invert ? 1 - h : h) + w_salience * stands_out + w_alignment * alignment) / w_sum;
        if (call.base) {
          call.base[at] = raw;
          call.inverse[at] = inverse;
        } else {
          call.out[at] = T(clamped(raw));
        }
      }
      if (++column == call.columns) column = 0, ++row;
    }
    if constexpr (Columns) {
      const int64_t size = Vector::size(width);
      A* sums = reinterpret_cast<A*>(memory) + (Query ? size : 0);
      const Vector own{sums + warp * size};
      __syncthreads();  // the last chunk is done with it
#pragma unroll
      for (int k = 0; k < kPieces<T>; ++k)
        if (RowTile<T>::at(k) < width) own.store(0, k, columns[k]);
      __syncthreads();
      for (int64_t d = threadIdx.x; d < width; d += kThreads) {
        A sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += Vector{sums + w * size}[d];
        call.partial[item * width + d] = sum;
      }
    }
  }
}

// How much each row differs from the mean. A warp takes kRows rows; the last samples come first, since they are what
// the cache still holds.
template <bool Aligned, class T, class A>
__global__ void finish_kernel(const Call<T> call, const A* unit) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t count = call.count(), per_sample = (count + kRows - 1) / kRows, items = call.batch * per_sample;
  for (int64_t i = int64_t(blockIdx.x) * kCosineWarps + threadIdx.x / kWarpSize; i < items;
       i += int64_t(gridDim.x) * kCosineWarps) {
    const int64_t item = items - 1 - i, sample = item / per_sample, first = item % per_sample * kRows;
    const int rows = int(min(int64_t(kRows), count - first));
    A squares[kRows], products[kRows][1];
    row_products<1, Aligned>(call.features + (sample * count + first) * call.width, rows, unit + sample * call.width, 1,
                             call.width, squares, products);
    A product = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (lane == r) product = products[r][0];
    if (lane >= rows) continue;
    const T* weights = call.weights + sample * call.weight_stride;
    const A share = A(weights[1]) / (A(weights[0]) + A(weights[1]) + A(weights[2])) * call.features_weight;
    const int64_t at = sample * count + first + lane;
    call.out[at] = T(clamped(call.base[at] + share * (1 - product * call.inverse[at]) / 2));
  }
}

template <bool Aligned, bool Query, bool Columns, class T>
void launch_rows(const Call<T>& call, cudaStream_t stream) {
  using A = accumulate_t<T>;
  const int64_t vectors = (Query ? 1 : 0) + (Columns ? kWarps : 0);
  const size_t bytes = vectors * SharedVector<T, A>::size(call.width) * sizeof(A);
  const auto kernel = rows_kernel<Aligned, Query, Columns, T>;
  if (bytes > 48 << 10)
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
  kernel<<<grid_size(call.batch * call.chunks, 1), kThreads, bytes, stream>>>(call);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <bool Aligned, class T>
void launch_rows(const Call<T>& call, bool columns, cudaStream_t stream) {
  if (call.alignment)
    return columns ? launch_rows<Aligned, false, true>(call, stream) : launch_rows<Aligned, false, false>(call, stream);
  return columns ? launch_rows<Aligned, true, true>(call, stream) : launch_rows<Aligned, true, false>(call, stream);
}

template <class A>
A* allocate(std::vector<Tensor>& memory, const Tensor& like, int64_t size) {
  memory.push_back(torch::stable::new_empty(like, {size}, scalar_type_of<A>));
  return static_cast<A*>(memory.back().mutable_data_ptr());
}

Tensor relevance_scores_cuda(const Tensor& features, const Tensor& query, const Tensor& colours, const Tensor& edges,
                             const Tensor& weights, const std::optional<Tensor>& mask,
                             std::vector<double> salience_weights, double temperature, bool invert_entropy) {
  check_relevance_scores(features, query, colours, edges, weights, mask, salience_weights, temperature);
  const CudaScope scope(features);
  const Tensor x = torch::stable::contiguous(features), q = torch::stable::contiguous(query),
               c = torch::stable::contiguous(colours), e = torch::stable::contiguous(edges),
               w = torch::stable::contiguous(weights);
  const std::optional<Tensor> kept = contiguous_mask(mask);
  const int64_t batch = x.size(0), count = x.size(1), width = x.size(2), tokens = q.dim() == 3 ? q.size(1) : 1;
  Tensor scores = torch::stable::new_empty(x, {batch, count});
  if (batch * count == 0) return scores;
  const SalienceWeights salience(salience_weights);
  const cudaStream_t stream = scope.stream();
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    const auto data = [](const Tensor& tensor) { return static_cast<const T*>(tensor.const_data_ptr()); };
    std::vector<Tensor> memory;
    Call<T> call{};
    call.features = data(x), call.query = data(q), call.colours = data(c), call.edges = data(e), call.weights = data(w);
    call.mask = mask_data(kept);
    call.out = static_cast<T*>(scores.mutable_data_ptr());
    call.batch = batch, call.rows = c.size(2), call.columns = c.size(3), call.width = width;
    call.weight_stride = w.dim() == 2 ? 3 : 0;
    // Few rows a warp spread a small sample over the device. The order of column sums depends on N and D alone.
    call.warp_rows = int(std::clamp<int64_t>(count / 1024, 1, 4));
    call.chunks = (count + kWarps * call.warp_rows - 1) / (kWarps * call.warp_rows);
    call.scale = A(kLog2E / temperature);
    call.entropy_norm = width > 1 ? A(1 / std::log2(double(width))) : A(0);
    call.edge_weight = A(salience.edges), call.contrast_weight = A(salience.contrast);
    call.features_weight = A(salience.features);
    call.invert = invert_entropy;
    const bool mean = salience.features > 0, columns = mean && width <= kTile<T>;
    if (tokens > 1 || width * int64_t(sizeof(A)) > kQueryBytes) {
      const Queries<T> queries(q, call.mask, batch * tokens, width, stream);
      A* alignment = allocate<A>(memory, x, batch * count);
      launch_alignment(call.features, queries, call.mask, alignment, batch, count, tokens, width, stream);
      call.alignment = alignment;
    }
    const ColumnCut cut(batch, count, width, 1);
    const int64_t chunks = columns ? call.chunks : cut.chunks;
    if (mean) {
      call.base = allocate<A>(memory, x, batch * count), call.inverse = allocate<A>(memory, x, batch * count);
      call.partial = allocate<A>(memory, x, batch * chunks * width);
    }
    const bool aligned = is_vectorisable(call.features, width);
    aligned ? launch_rows<true>(call, columns, stream) : launch_rows<false>(call, columns, stream);
    if (!mean) return;
    if (!columns) launch_column_sums<T, A>(call.features, nullptr, nullptr, call.partial, cut, stream);
    A* unit = allocate<A>(memory, x, batch * width);
    launch_mean_unit<A>(call.partial, unit, nullptr, batch, chunks, count, width, stream);
    const unsigned blocks = grid_size(batch * ((count + kRows - 1) / kRows), kCosineWarps);
    if (aligned) {
      finish_kernel<true><<<blocks, kCosineThreads, 0, stream>>>(call, unit);
    } else {
      finish_kernel<false><<<blocks, kCosineThreads, 0, stream>>>(call, unit);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return scores;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("relevance_scores", TORCH_BOX(&relevance_scores_cuda)); }

}  // namespace arr_coc
