#include <torch/csrc/stable/library.h>

#include "arr_coc/bias_relu/bias_relu.h"
#include "arr_coc/common/map.cuh"

namespace arr_coc {

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) { m.impl("bias_relu", TORCH_BOX(&bias_relu<Cuda>)); }

}  // namespace arr_coc
