#include <torch/csrc/stable/library.h>

#include "arr_coc/invariant_linear/tiles.cuh"

namespace arr_coc {
namespace {

template <class Kernel>
void allow_shared_memory(Kernel kernel, int bytes) {
  constexpr int kWithoutAsking = 48 * 1024;
  if (bytes > kWithoutAsking)
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// How a product is divided into blocks.
enum class Way { kFewRows, kLargeTiles, kSmallTiles, kSharedSmallTiles };

template <class T>
constexpr int kSharedBytes = SmallTile::kBytes<accumulate_t<T>>;

template <class T>
bool runs_shared_tiles(int parts) {
  return clusters_at_a_time<shared_tile_kernel<SmallTile, T>>(parts, SmallTile::kThreads, kSharedBytes<T>) > 0;
}

template <class Form, class T>
int64_t tiles(const InvariantLinear<T>& call) {
  return ceil_div(call.rows, Form::kRows) * ceil_div(call.width, Form::kColumns);
}

// The way that takes least time, by lines through the times of 39 products on an H200 in float32: microseconds of sums
// of 384 products, by the number of tiles of the multiprocessor that has most of them. All ways give the same bits.
template <class T>
Way fastest_way(const InvariantLinear<T>& call) {
  constexpr int64_t kMostFewRows = 48;
  if (call.rows <= kMostFewRows) return Way::kFewRows;
  const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount), parts = call.order.parts();
  const auto small = [&](int64_t blocks) { return 10.3 * double(ceil_div(blocks, processors)) + 6; };
  const double length = double(call.in) / 384;
  const double large = length * (35.2 * double(ceil_div(tiles<LargeTile>(call), processors)) + 6);
  const double alone = length * small(tiles<SmallTile>(call));
  const double shared = 1.12 * length / double(parts) * small(tiles<SmallTile>(call) * parts) + 3;
  if (std::is_same_v<T, float> && large <= std::min(alone, shared)) return Way::kLargeTiles;
  return parts > 1 && shared < alone && runs_shared_tiles<T>(int(parts)) ? Way::kSharedSmallTiles : Way::kSmallTiles;
}

template <class T>
void launch_few_rows(const InvariantLinear<T>& call, const Cuda& device) {
  const int parts = int(call.order.parts()), bytes = parts * int(sizeof(FewRowsOfPart<accumulate_t<T>>));
  const int64_t blocks = ceil_div(call.rows, kFewRows) * ceil_div(call.width, kFewColumns);
  allow_shared_memory(few_rows_kernel<T>, bytes);
  device.launch(few_rows_kernel<T>, {unsigned(blocks), unsigned(parts * kWarpSize), size_t(bytes)}, call);
}

template <class Form, class T>
void launch_tiles(const InvariantLinear<T>& call, const Cuda& device) {
  constexpr int kBytes = Form::template kBytes<accumulate_t<T>>;
  allow_shared_memory(tile_kernel<Form, T>, kBytes);
  device.launch(tile_kernel<Form, T>, {unsigned(tiles<Form>(call)), Form::kThreads, kBytes}, call);
}

template <class T>
void launch_shared_tiles(const InvariantLinear<T>& call, const Cuda& device) {
  const ClusterLaunch launch(int(call.order.parts()), unsigned(tiles<SmallTile>(call)), SmallTile::kThreads,
                             kSharedBytes<T>, device.stream());
  STD_CUDA_CHECK(cudaLaunchKernelEx(&launch.config, shared_tile_kernel<SmallTile, T>, call));
}

}  // namespace

template <class T>
void run(const Cuda& device, const InvariantLinear<T>& call) {
  const Way way = fastest_way(call);
  if (way == Way::kFewRows) return launch_few_rows(call, device);
  if (way == Way::kSharedSmallTiles) return launch_shared_tiles(call, device);
  if constexpr (std::is_same_v<T, float>)
    if (way == Way::kLargeTiles) return launch_tiles<LargeTile>(call, device);
  launch_tiles<SmallTile>(call, device);
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("invariant_linear", TORCH_BOX(&invariant_linear<Cuda>)); }

}  // namespace arr_coc
