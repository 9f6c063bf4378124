#include <torch/csrc/stable/library.h>

#include "arr_coc/common/map.cuh"
#include "arr_coc/relu/relu.h"

namespace arr_coc {

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CUDA, m) {
  m.impl("relu", TORCH_BOX(&relu<Cuda>));
  m.impl("relu_grad", TORCH_BOX(&relu_grad<Cuda>));
}

}  // namespace arr_coc
