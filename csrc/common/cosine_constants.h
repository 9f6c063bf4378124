// What cosines on the CPU and on CUDA agree on.
#pragma once

#include <cstdint>

namespace arr_coc {

// Norms are clamped to at least this before anything is divided by them, as torch.nn.functional.normalize does.
constexpr double kNormFloor = 1e-12;

// Rows a column sum takes in one piece, times the number of groups: partial sums stay below 1 / kColumnChunk of the
// input.
constexpr int64_t kColumnChunk = 128;

}  // namespace arr_coc
