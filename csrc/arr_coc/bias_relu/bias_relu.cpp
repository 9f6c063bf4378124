#include "arr_coc/bias_relu/bias_relu.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/map.h"

namespace arr_coc {

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) { m.def("bias_relu(Tensor x, Tensor bias) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("bias_relu", TORCH_BOX(&bias_relu<Cpu>)); }

}  // namespace arr_coc
