#include "arr_coc/relu/relu.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/map.h"

namespace arr_coc {

template <class A>
constexpr bool kSelects<ReluGrad<A>> = true;

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("relu(Tensor x) -> Tensor");
  m.def("relu_grad(Tensor grad, Tensor output) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("relu", TORCH_BOX(&relu<Cpu>));
  m.impl("relu_grad", TORCH_BOX(&relu_grad<Cpu>));
}

}  // namespace arr_coc
