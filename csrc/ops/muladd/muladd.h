#pragma once

#include "common/checks.h"

namespace arr_coc {

inline void check_muladd(const Tensor& a, const Tensor& b) {
  const char* op = "muladd";
  check_floating(op, "a", a);
  check_alike(op, "a", a, "b", b);
  check_same_shape(op, "a", a, "b", b);
}

template <class A>
struct MulAdd {
  A c;
  ARR_COC_FUNCTION A operator()(A a, A b) const { return a * b + c; }
};

}  // namespace arr_coc
