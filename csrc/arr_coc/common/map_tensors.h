// Adapters of elementwise operators. `map` and `map_rows` are in common/map.h and common/map.cuh.
#pragma once

#include <utility>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

template <class Device, template <class> class F, size_t N, size_t... Is, class... Numbers>
Tensor map_tensors(const Tensor (&tensors)[N], std::index_sequence<Is...>, Numbers... numbers) {
  const Device device(tensors[0]);
  const Tensor in[] = {as_contiguous(tensors[Is])...};
  Tensor out = allocate(in[0], in[0].sizes());
  dispatch_floating(out.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    map(device, F<A>{A(numbers)...}, data_of<T>(out), out.numel(), data_of<T>(in[Is])...);
  });
  return out;
}

// Returns the tensor of f(in...), for tensors of one shape and dtype. f is F<A>{numbers...}, with A the computing type.
template <class Device, template <class> class F, size_t N, class... Numbers>
Tensor map_tensors(const Tensor (&tensors)[N], Numbers... numbers) {
  return map_tensors<Device, F>(tensors, std::make_index_sequence<N>(), numbers...);
}

inline void check_x_and_bias(const char* op, const Tensor& x, const Tensor& bias) {
  check_floating(op, "x", x);
  check(x.dim() > 0, op, ": x must be [..., D], got shape ", shape_of(x));
  check_row(op, "bias", bias, x);
}

// Returns the tensor of f(x, bias) for x [..., D] and bias [D].
template <class Device, template <class> class F, class... Numbers>
Tensor map_x_and_bias(const Tensor& x, const Tensor& bias, Numbers... numbers) {
  const Device device(x);
  const Tensor in = as_contiguous(x), row = as_contiguous(bias);
  Tensor out = allocate(in, in.sizes());
  dispatch_floating(out.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    map_rows(device, F<A>{A(numbers)...}, data_of<T>(out), out.numel(), data_of<T>(in), data_of<T>(row), row.size(0));
  });
  return out;
}

}  // namespace arr_coc
