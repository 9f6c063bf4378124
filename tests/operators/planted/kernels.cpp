// Kernels with one fault each, as kernels have them, and right ones beside them. table.py says what is wrong.
#include <torch/csrc/stable/library.h>

#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "shared.h"

namespace {

// --- right -----------------------------------------------------------------------------------------------------------

Tensor right_row_sum(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) { return sum_of(row, 0, n); });
}

Tensor right_half(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    torch::stable::parallel_for(0, n, 4096, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = halved(from[i]);
    });
  });
}

Tensor softmax(const Tensor& given, std::vector<double>& scratch, bool shifted) {
  check_rows(given);
  Tensor x = torch::stable::contiguous(given), out = like(x);
  const int64_t n = x.size(1);
  scratch.resize(std::max<size_t>(scratch.size(), n));
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < x.size(0); ++i) {
      const T* row = read<T>(x) + i * n;
      Sum<T> greatest = 0, total = 0;
      for (int64_t j = 0; shifted && j < n; ++j) {
        greatest = j && greatest >= Sum<T>(row[j]) ? greatest : Sum<T>(row[j]);
      }
      for (int64_t j = 0; j < n; ++j) scratch[j] = std::exp(Sum<T>(row[j]) - greatest);
      for (int64_t j = 0; j < n; ++j) total += Sum<T>(scratch[j]);
      for (int64_t j = 0; j < n; ++j) write<T>(out)[i * n + j] = T(Sum<T>(scratch[j]) / total);
    }
  });
  return out;
}

Tensor right_softmax(const Tensor x) {
  std::vector<double> scratch;
  return softmax(x, scratch, true);
}

enum class Length { any, one_too, same };

Tensor weighted(const Tensor& given, const Tensor& given_weight, Length length) {
  check_rows(given);
  STD_TORCH_CHECK(given_weight.dim() == 1 && given_weight.scalar_type() == given.scalar_type(), "weight must be a row");
  const bool fits = given_weight.size(0) == given.size(1) || (given_weight.size(0) == 1 && length == Length::one_too);
  STD_TORCH_CHECK(fits || length == Length::any, "weight must have a number for each column");
  Tensor x = torch::stable::contiguous(given), weight = torch::stable::contiguous(given_weight), out = like(x);
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < x.numel(); ++i) {
      write<T>(out)[i] = T(Sum<T>(read<T>(x)[i]) * Sum<T>(read<T>(weight)[i % x.size(1)]));
    }
  });
  return out;
}

Tensor right_weighted(const Tensor x, const Tensor weight) { return weighted(x, weight, Length::same); }

Tensor weight_length_unchecked(const Tensor x, const Tensor weight) { return weighted(x, weight, Length::any); }

Tensor weight_of_one(const Tensor x, const Tensor weight) { return weighted(x, weight, Length::one_too); }

Tensor wrong_constant(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = Sum<std::decay_t<decltype(*to)>>(from[i]) * 0.5005f;
  });
}

// --- ends and tails --------------------------------------------------------------------------------------------------

Tensor row_sum_from_one(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) { return sum_of(row, 1, n); });
}

Tensor row_sum_short(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) { return sum_of(row, 0, n - 1); });
}

Tensor rows_short(const Tensor given) {
  check_rows(given);
  Tensor x = torch::stable::contiguous(given), out = torch::stable::new_zeros(x, x.sizes());
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < (x.size(0) - 1) * x.size(1); ++i) write<T>(out)[i] = halved(read<T>(x)[i]);
  });
  return out;
}

Tensor sum_tail(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) {
    const int64_t lanes = 32 / sizeof(*row);
    return sum_of(row, 0, n / lanes * lanes);
  });
}

Tensor vector_tail(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = i < n / 4 * 4 ? halved(from[i]) : from[i];
  });
}

Tensor grain_tail(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    std::fill(to, to + n, 0);
    torch::stable::parallel_for(0, n, 32768, [=](int64_t begin, int64_t end) {
      const int64_t last = end == n ? end : begin + (end - begin) / 16 * 16;
      for (int64_t i = begin; i < last; ++i) to[i] = halved(from[i]);
    });
  });
}

Tensor narrow_index(const Tensor given) {
  check_rows(given);
  Tensor x = torch::stable::contiguous(given), out = torch::stable::new_zeros(x, x.sizes());
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < x.size(0); ++i) {
      const int64_t row = int64_t(uint16_t(i)) * x.size(1);
      for (int64_t j = 0; j < x.size(1); ++j) write<T>(out)[row + j] = halved(read<T>(x)[row + j]);
    }
  });
  return out;
}

Tensor fixed_buffer(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) {
    float buffer[256];
    for (volatile int64_t j = 0; j < n; j = j + 1) buffer[j] = float(row[j]);
    return sum_of(buffer, 0, std::min<int64_t>(n, 256));
  });
}

// --- memory ----------------------------------------------------------------------------------------------------------

Tensor flat_strides(const Tensor x) {
  Tensor out = like(x);
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < x.numel(); ++i) write<T>(out)[i] = halved(read<T>(x)[i]);
  });
  return out;
}

Tensor unaligned(const Tensor& x, int64_t least) {
  return flat(x, [least](const auto* from, auto* to, int64_t n) {
    const int64_t off = reinterpret_cast<uintptr_t>(from) % 16 / sizeof(*from);
    const int64_t shift = off >= least ? off - least + 1 : 0;
    for (int64_t i = 0; i < n; ++i) to[i] = halved(from[std::max<int64_t>(0, i - shift)]);
  });
}

Tensor aligned_only(const Tensor x) { return unaligned(x, 1); }

Tensor peels_two(const Tensor x) { return unaligned(x, 3); }

Tensor channels_as_they_lie(const Tensor x) {
  STD_TORCH_CHECK(x.dim() == 4, "x must have 4 dimensions");
  const bool last = x.stride(1) == 1 && x.size(1) > 1;
  Tensor own = last ? x : torch::stable::contiguous(x);
  STD_TORCH_CHECK(!last || x.stride(3) == x.size(1), "x must be dense");
  Tensor out = like(x);
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < x.numel(); ++i) write<T>(out)[i] = halved(read<T>(own)[i]);
  });
  return out;
}

Tensor tail_not_written(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    for (int64_t i = 0; i < n / 8 * 8; ++i) to[i] = halved(from[i]);
  });
}

Tensor sum_from_garbage(const Tensor given) {
  check_rows(given);
  Tensor x = torch::stable::contiguous(given), out = torch::stable::new_empty(x, {x.size(1)});
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < x.numel(); ++i) {
      T& sum = write<T>(out)[i % x.size(1)];
      sum = T(Sum<T>(sum) + Sum<T>(read<T>(x)[i]));
    }
  });
  return out;
}

Tensor k_unchecked(const Tensor given, int64_t k) {
  check_rows(given);
  STD_TORCH_CHECK(k > 0 && k < 1000, "k must be positive");
  return by_row(given, [k](const auto* row, int64_t n) { return sum_of(row, 0, k); });
}

Tensor index_unchecked(const Tensor given, const Tensor index) {
  check_rows(given);
  STD_TORCH_CHECK(index.dim() == 1 && index.scalar_type() == ScalarType::Long, "index must be a vector of int64");
  Tensor x = torch::stable::contiguous(given), rows = torch::stable::contiguous(index);
  Tensor out = torch::stable::new_empty(x, {rows.size(0), x.size(1)});
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t n = x.size(1);
    for (int64_t i = 0; i < out.numel(); ++i) {
      write<T>(out)[i] = read<T>(x)[read<int64_t>(rows)[i / n] * n + i % n];
    }
  });
  return out;
}

Tensor weight_as_float(const Tensor given, const Tensor weight) {
  check_rows(given);
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == given.size(1), "weight must have a number for each column");
  Tensor x = torch::stable::contiguous(given), own = torch::stable::contiguous(weight), out = like(x);
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const bool narrow = sizeof(T) < sizeof(float);
    for (int64_t i = 0; i < x.numel(); ++i) {
      const int64_t j = i % x.size(1);
      const float by = narrow ? float(read<T>(own)[j]) : read<float>(own)[j];
      write<T>(out)[i] = T(Sum<T>(read<T>(x)[i]) * by);
    }
  });
  return out;
}

Tensor empty_row(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) { return sum_of(row, 0, n) / float(1024 / n); });
}

// --- threads ---------------------------------------------------------------------------------------------------------

Tensor racing_sum(const Tensor given) {
  check_rows(given);
  Tensor x = torch::stable::contiguous(given), out = torch::stable::new_zeros(x, {x.size(1)});
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const T* from = read<T>(x);
    T* to = write<T>(out);
    const int64_t n = x.size(1);
    torch::stable::parallel_for(0, x.size(0), std::max<int64_t>(1, 32768 / std::max<int64_t>(n, 1)),
                                [=](int64_t begin, int64_t end) {
                                  for (int64_t i = begin * n; i < end * n; ++i) {
                                    to[i % n] = T(Sum<T>(to[i % n]) + Sum<T>(from[i]));
                                  }
                                });
  });
  return out;
}

Tensor static_scratch(const Tensor x) {
  static std::vector<double> scratch;
  return softmax(x, scratch, true);
}

Tensor static_scratch_for_long_rows(const Tensor x) {
  static std::vector<double> scratch(1 << 20);
  std::vector<double> own;
  return softmax(x, x.dim() == 2 && x.size(1) > 1024 && x.size(1) <= 1 << 20 ? scratch : own, true);
}

Tensor cached_by_address(const Tensor given) {
  static thread_local std::map<std::pair<const void*, int64_t>, double> cache;
  Tensor x = torch::stable::contiguous(given);
  Tensor out = like(x);
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    auto [at, fresh] = cache.try_emplace({x.const_data_ptr(), x.numel()}, 0);
    if (fresh) at->second = 1 + std::fabs(double(sum_of(read<T>(x), 0, x.numel())));
    for (int64_t i = 0; i < x.numel(); ++i) write<T>(out)[i] = T(Sum<T>(read<T>(x)[i]) / Sum<T>(at->second));
  });
  return out;
}

Tensor leaking(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) {
    auto* scratch = static_cast<float*>(std::malloc(sizeof(float) * (n + 64)));
    for (int64_t j = 0; j < n; ++j) scratch[j] = float(row[j]);
    return sum_of(scratch, 0, n);
  });
}

// --- numbers ---------------------------------------------------------------------------------------------------------

Tensor narrow_sum(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) {
    std::remove_const_t<std::remove_reference_t<decltype(*row)>> sum = 0;
    for (int64_t j = 0; j < n; ++j) sum = sum + row[j] * row[j];
    return sum;
  });
}

Tensor float_in_double(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = std::tanh(float(from[i]) * 0.7978845608f);
  });
}

Tensor softmax_not_shifted(const Tensor x) {
  std::vector<double> scratch;
  return softmax(x, scratch, false);
}

Tensor cancelling_variance(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) {
    auto sum = sum_of(row, 0, n), squares = sum - sum;
    for (int64_t j = 0; j < n; ++j) squares += decltype(sum)(row[j]) * decltype(sum)(row[j]);
    return squares / n - sum / n * (sum / n);
  });
}

Tensor max_without_nan(const Tensor x) {
  return by_row(x, [](const auto* row, int64_t n) {
    float greatest = -std::numeric_limits<float>::infinity();
    for (int64_t j = 0; j < n; ++j) greatest = float(row[j]) > greatest ? float(row[j]) : greatest;
    return greatest;
  });
}

Tensor clamp_without_nan(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = std::fmax(-1.5f, std::fmin(1.5f, float(from[i])));
  });
}

Tensor zero_without_sign(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = halved(from[i]) + 0.0f;
  });
}

Tensor scale_of_the_batch(const Tensor x) {
  return flat(x, [](const auto* from, auto* to, int64_t n) {
    float greatest = 1e-6f;
    for (int64_t i = 0; i < n; ++i) greatest = std::max(greatest, std::fabs(float(from[i])));
    for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]) / greatest;
  });
}

// --- arguments -------------------------------------------------------------------------------------------------------

Tensor bias_ignored(const Tensor x, std::optional<Tensor> bias) {
  check_rows(x);
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == x.size(1)), "bias must fit the columns");
  return right_half(x);
}

Tensor last_ignored(std::vector<Tensor> xs) {
  STD_TORCH_CHECK(!xs.empty(), "xs must have a tensor");
  for (const Tensor& x : xs) {
    STD_TORCH_CHECK(x.sizes().equals(xs[0].sizes()) && x.scalar_type() == xs[0].scalar_type(), "xs must be alike");
  }
  Tensor out = torch::stable::new_zeros(xs[0], xs[0].sizes());
  of_dtype(out, [&](auto zero) {
    using T = decltype(zero);
    for (size_t k = 0; k + 1 < std::max<size_t>(xs.size(), 2); ++k) {
      Tensor x = torch::stable::contiguous(xs[k]);
      for (int64_t i = 0; i < x.numel(); ++i) write<T>(out)[i] = T(Sum<T>(write<T>(out)[i]) + Sum<T>(read<T>(x)[i]));
    }
  });
  return out;
}

Tensor same_tensor(const Tensor x, bool training) { return training ? right_half(x) : x; }

std::tuple<Tensor, Tensor> part_of_the_other(const Tensor x) {
  Tensor all = right_half(x);
  STD_TORCH_CHECK(all.dim() > 0 && all.size(0) > 0, "x must have rows");
  return {all, torch::stable::narrow(all, 0, 0, 1)};
}

Tensor halves_its_argument(const Tensor x) {
  if (!x.is_contiguous()) return right_half(x);
  of_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < x.numel(); ++i) write<T>(x)[i] = halved(read<T>(x)[i]);
  });
  return torch::stable::clone(x);
}

}  // namespace

// clang-format off
#define OPERATORS(each) \
  each(right_row_sum, "(Tensor x) -> Tensor") \
  each(right_half, "(Tensor x) -> Tensor") \
  each(right_softmax, "(Tensor x) -> Tensor") \
  each(row_sum_from_one, "(Tensor x) -> Tensor") \
  each(row_sum_short, "(Tensor x) -> Tensor") \
  each(rows_short, "(Tensor x) -> Tensor") \
  each(sum_tail, "(Tensor x) -> Tensor") \
  each(vector_tail, "(Tensor x) -> Tensor") \
  each(grain_tail, "(Tensor x) -> Tensor") \
  each(narrow_index, "(Tensor x) -> Tensor") \
  each(fixed_buffer, "(Tensor x) -> Tensor") \
  each(flat_strides, "(Tensor x) -> Tensor") \
  each(channels_as_they_lie, "(Tensor x) -> Tensor") \
  each(tail_not_written, "(Tensor x) -> Tensor") \
  each(sum_from_garbage, "(Tensor x) -> Tensor") \
  each(empty_row, "(Tensor x) -> Tensor") \
  each(racing_sum, "(Tensor x) -> Tensor") \
  each(static_scratch, "(Tensor x) -> Tensor") \
  each(static_scratch_for_long_rows, "(Tensor x) -> Tensor") \
  each(cached_by_address, "(Tensor x) -> Tensor") \
  each(leaking, "(Tensor x) -> Tensor") \
  each(narrow_sum, "(Tensor x) -> Tensor") \
  each(float_in_double, "(Tensor x) -> Tensor") \
  each(softmax_not_shifted, "(Tensor x) -> Tensor") \
  each(cancelling_variance, "(Tensor x) -> Tensor") \
  each(max_without_nan, "(Tensor x) -> Tensor") \
  each(clamp_without_nan, "(Tensor x) -> Tensor") \
  each(zero_without_sign, "(Tensor x) -> Tensor") \
  each(scale_of_the_batch, "(Tensor x) -> Tensor") \
  each(halves_its_argument, "(Tensor x) -> Tensor") \
  each(right_weighted, "(Tensor x, Tensor weight) -> Tensor") \
  each(weight_length_unchecked, "(Tensor x, Tensor weight) -> Tensor") \
  each(weight_of_one, "(Tensor x, Tensor weight) -> Tensor") \
  each(weight_as_float, "(Tensor x, Tensor weight) -> Tensor") \
  each(aligned_only, "(Tensor x) -> Tensor") \
  each(peels_two, "(Tensor x) -> Tensor") \
  each(k_unchecked, "(Tensor x, int k) -> Tensor") \
  each(index_unchecked, "(Tensor x, Tensor index) -> Tensor") \
  each(bias_ignored, "(Tensor x, Tensor? bias=None) -> Tensor") \
  each(last_ignored, "(Tensor[] xs) -> Tensor") \
  each(same_tensor, "(Tensor x, bool training) -> Tensor") \
  each(part_of_the_other, "(Tensor x) -> (Tensor, Tensor)") \
  each(wrong_constant, "(Tensor x) -> Tensor")
// clang-format on

#define DEFINE(name, schema) m.def(#name schema);
#define IMPLEMENT(name, schema) m.impl(#name, TORCH_BOX(&name));

STABLE_TORCH_LIBRARY(planted, m){OPERATORS(DEFINE)}

STABLE_TORCH_LIBRARY_IMPL(planted, CPU, m) {
  OPERATORS(IMPLEMENT)
}
