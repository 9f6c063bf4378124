#pragma once

#include "common/checks.h"

namespace arr_coc {

inline void check_muladd(const Tensor& a, const Tensor& b) {
  const char* op = "muladd";
  check_floating(op, "a", a);
  check_alike(op, "a", a, "b", b);
  check_same_shape(op, "a", a, "b", b);
}

inline void check_muladd_grad(const Tensor& grad, const Tensor& a, const Tensor& b) {
  const char* op = "muladd_grad";
  check_floating(op, "a", a);
  check_alike(op, "a", a, "b", b);
  check_same_shape(op, "a", a, "b", b);
  check_alike(op, "a", a, "grad", grad);
  check_same_shape(op, "a", a, "grad", grad);
}

template <class A>
struct MulAdd {
  A c;
  ARR_COC_FUNCTION A operator()(A a, A b) const { return a * b + c; }
};

struct Multiply {
  template <class A>
  ARR_COC_FUNCTION A operator()(A a, A b) const {
    return a * b;
  }
};

}  // namespace arr_coc
