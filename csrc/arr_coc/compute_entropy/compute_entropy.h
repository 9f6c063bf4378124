#pragma once

#include <cmath>

#include "arr_coc/common/checks.h"
#include "arr_coc/common/tensors.h"

namespace arr_coc {

constexpr double kLog2E = 1.4426950408889634;

inline void check_compute_entropy(const Tensor& features, double temperature) {
  const char* op = "compute_entropy";
  check_features(op, features);
  check(temperature > 0, op, ": temperature must be > 0, got ", temperature);
}

// What makes an entropy in powers of two one of [0, 1].
inline double entropy_norm(int64_t width) { return width > 1 ? 1 / std::log2(double(width)) : 0; }

// `scale` is log2 e / temperature.
template <class T>
struct Entropy {
  const T* x;
  T* out;
  int64_t rows, width;
  accumulate_t<T> scale, norm;
};

template <class T>
struct EntropyGrad {
  const T *grad, *x;
  T* out;
  int64_t rows, width;
  accumulate_t<T> scale, norm;
};

template <class Device>
Tensor compute_entropy(const Tensor& features, double temperature) {
  check_compute_entropy(features, temperature);
  const Device device(features);
  const Tensor x = as_contiguous(features);
  const int64_t rows = x.size(0) * x.size(1), width = x.size(2);
  Tensor entropy = allocate(x, {x.size(0), x.size(1)});
  if (rows == 0) return entropy;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    run(device,
        Entropy<T>{data_of<T>(x), data_of<T>(entropy), rows, width, A(kLog2E / temperature), A(entropy_norm(width))});
  });
  return entropy;
}

template <class Device>
Tensor compute_entropy_grad(const Tensor& grad, const Tensor& features, double temperature) {
  check_compute_entropy(features, temperature);
  check_patch_grad("compute_entropy_grad", grad, features);
  const Device device(features);
  const Tensor x = as_contiguous(features), g = as_contiguous(grad);
  const int64_t rows = x.size(0) * x.size(1), width = x.size(2);
  Tensor grad_features = allocate(x, x.sizes());
  if (rows == 0) return grad_features;
  dispatch_floating(x.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    // d ln p = ln 2 d log2 p, over ln D.
    const A norm = width > 1 ? A(1 / (temperature * std::log2(double(width)))) : A(0);
    run(device, EntropyGrad<T>{data_of<T>(g), data_of<T>(x), data_of<T>(grad_features), rows, width,
                               A(kLog2E / temperature), norm});
  });
  return grad_features;
}

}  // namespace arr_coc
