// potential::gaussians(Tensor r, Tensor centres, float width, int order) -> Tensor
//
// exp(-((r - centre) / width)^2) for each of r [E] and centres [K], differentiated `order` times by r: [E, K]. The
// gradient of one order is the next one, so that energies have forces, and forces have gradients. LibTorch's stable ABI
// only.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

// The derivative by z = (r - centre) / width is a Hermite polynomial, up to the sign, times the function itself.
template <class T>
T hermite(int64_t order, T z) {
  T before = 0, now = 1;
  for (int64_t n = 0; n < order; ++n) {
    const T next = 2 * z * now - 2 * n * before;
    before = now;
    now = next;
  }
  return order % 2 ? -now : now;
}

template <class T>
void compute(const Tensor& r, const Tensor& centres, double width, int64_t order, Tensor& out) {
  const T *distance = r.const_data_ptr<T>(), *centre = centres.const_data_ptr<T>();
  T* values = out.mutable_data_ptr<T>();
  const int64_t count = centres.size(0);
  const T inverse = T(1 / width), factor = T(std::pow(1 / width, double(order)));
  torch::stable::parallel_for(0, r.size(0), 1 + 4096 / (count + 1), [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e)
      for (int64_t k = 0; k < count; ++k) {
        const T z = (distance[e] - centre[k]) * inverse;
        values[e * count + k] = factor * hermite(order, z) * std::exp(-z * z);
      }
  });
}

Tensor gaussians(const Tensor& r, const Tensor& centres, double width, int64_t order) {
  STD_TORCH_CHECK(r.dim() == 1 && centres.dim() == 1, "gaussians: r and centres must have 1 dimension");
  STD_TORCH_CHECK(r.scalar_type() == centres.scalar_type(), "gaussians: r and centres must have one dtype");
  STD_TORCH_CHECK(width > 0 && order >= 0, "gaussians: width must be positive, and order not negative");
  const ScalarType dtype = r.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "gaussians: r must be float32 or float64");
  const Tensor distances = torch::stable::contiguous(r), places = torch::stable::contiguous(centres);
  Tensor out = torch::stable::new_empty(distances, {r.size(0), centres.size(0)});
  if (dtype == ScalarType::Float)
    compute<float>(distances, places, width, order, out);
  else
    compute<double>(distances, places, width, order, out);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(potential, m) { m.def("gaussians(Tensor r, Tensor centres, float width, int order) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(potential, CPU, m) { m.impl("gaussians", TORCH_BOX(&gaussians)); }
