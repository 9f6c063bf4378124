// How far an output is from its reference, and how far it may be. FORMAT.md states the rule under "Verdicts"; Python
// and the C++ runtime both compute it here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "package/manifest.h"

namespace exportkit {

// A package's error may be this many times eager's, plus these units in the last place of the output's dtype and of
// float32, in which the sums of narrower dtypes are computed. docs/adr/0020-accuracy.md has the reasons.
inline constexpr double kErrorFactor = 3;
inline constexpr double kOutputUlps = 1;
inline constexpr double kFloat32Ulps = 64;

// The difference of some elements from their reference, each relative to the reference's magnitude there, or to the
// typical magnitude if that is greater.
struct MeasuredError {
  Accuracy size;
  size_t compared = 0, beyond = 0;  // elements, and how many of them exceed the limit
  size_t greatest_at = 0;           // the index of the greatest difference
};

// The median magnitude of the elements that are neither 0 nor infinite nor NaN; 1 if there is none.
double typical_magnitude(std::span<const double> reference);

// Compares values with a reference of the same length. `selected` has a nonzero byte for each element to compare, or is
// null for all. Two NaNs are equal, an infinity equals itself, and any other difference from one of them is infinite.
MeasuredError measure_error(std::span<const double> reference, const double* values, const uint8_t* selected,
                            double typical, double limit);

// The greatest error that a package may have in an output of this dtype where eager has this one.
Accuracy allowed_error(const Accuracy& eager, std::string_view dtype);

// The dtype of a floating output's reference in a case: twice as wide, so that its rounding does not count.
std::string_view reference_dtype(std::string_view dtype);

}  // namespace exportkit
