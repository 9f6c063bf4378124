// Constants shared by the cosines on the CPU and on CUDA.
#pragma once

#include <cstdint>

namespace arr_coc {

// Norms are clamped to at least this before a division, like in torch.nn.functional.normalize.
constexpr double kNormFloor = 1e-12;

// The rows in a chunk of a column sum, times the number of groups. So partial sums take less than 1 / kColumnChunk of
// the input's memory.
constexpr int64_t kColumnChunk = 128;

}  // namespace arr_coc
