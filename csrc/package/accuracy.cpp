#include "package/accuracy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace exportkit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double distance(double value, double reference) {
  if (value == reference || (std::isnan(value) && std::isnan(reference))) return 0;
  const double difference = std::abs(value - reference);
  return std::isfinite(difference) ? difference : kInfinity;
}

// The distance from 1 to the next number.
double ulp_of(std::string_view dtype) {
  if (dtype == "float64") return std::ldexp(1, -52);
  if (dtype == "float32") return std::ldexp(1, -23);
  if (dtype == "float16") return std::ldexp(1, -10);
  if (dtype == "bfloat16") return std::ldexp(1, -7);
  return dtype.starts_with("float8_e4m3") ? std::ldexp(1, -3) : std::ldexp(1, -2);
}

}  // namespace

double typical_magnitude(std::span<const double> reference) {
  std::vector<double> magnitudes;
  magnitudes.reserve(reference.size());
  for (const double value : reference) {
    if (value != 0 && std::isfinite(value)) magnitudes.push_back(std::abs(value));
  }
  if (magnitudes.empty()) return 1;
  const auto middle = magnitudes.begin() + static_cast<std::ptrdiff_t>(magnitudes.size() / 2);
  std::nth_element(magnitudes.begin(), middle, magnitudes.end());
  return *middle;
}

MeasuredError measure_error(std::span<const double> reference, const double* values, const uint8_t* selected,
                            double typical, double limit) {
  MeasuredError error;
  double squares = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    if (selected != nullptr && selected[i] == 0) continue;
    const double far = distance(values[i], reference[i]);
    // An infinite reference would make any distance 0.
    const double relative = std::isfinite(far) && far > 0 ? far / std::max(std::abs(reference[i]), typical) : far;
    squares += relative * relative;
    error.compared += 1;
    error.beyond += relative > limit;
    if (relative > error.size.greatest) error.size.greatest = relative, error.greatest_at = i;
  }
  if (error.compared > 0) error.size.rms = std::sqrt(squares / static_cast<double>(error.compared));
  return error;
}

Accuracy allowed_error(const Accuracy& eager, std::string_view dtype) {
  const double floor = kOutputUlps * ulp_of(dtype) + kFloat32Ulps * ulp_of("float32");
  return {kErrorFactor * eager.rms + floor, kErrorFactor * eager.greatest + floor};
}

std::string_view reference_dtype(std::string_view dtype) {
  return dtype == "float64" || dtype == "float32" ? "float64" : "float32";
}

}  // namespace exportkit
