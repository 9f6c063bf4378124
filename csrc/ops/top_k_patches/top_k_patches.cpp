#include "ops/top_k_patches/top_k_patches.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "common/cpu.h"
#include "common/ordered_key.h"

namespace arr_coc {
namespace {

template <class Key>
struct Ranked {
  Key key;
  int64_t index;
  // Indices are unique, so this order is strict.
  bool operator<(const Ranked& other) const { return key != other.key ? key < other.key : index < other.index; }
};

template <class T>
ARR_COC_EVERY_ISA void write_keys(const T* scores, int64_t n, ordered_key_t<T>* keys) {
  for (int64_t i = 0; i < n; ++i) keys[i] = descending_key(scores[i]);
}

// Finds the k best of a row and sorts them. No loop branches on the scores, because the branches of a selection by
// comparison are mispredicted half the time.
template <class T>
class RowSelection {
 public:
  using Key = ordered_key_t<T>;

  void operator()(const T* scores, int64_t n, int64_t k, int64_t* out) {
    keys_.resize(n);
    write_keys(scores, n, keys_.data());
    chosen_.resize(k + 1);  // one extra element is written and ignored
    if (k < n) {
      find_cut(n, k);
      take_chosen(n);
    } else {
      for (int64_t i = 0; i < n; ++i) chosen_[i] = {keys_[i], i};
    }
    chosen_.pop_back();
    sort_chosen();
    for (int64_t j = 0; j < k; ++j) out[j] = chosen_[j].index;
  }

 private:
  static constexpr int kBits = OrderedKey<T>::bits, kSelectBits = 11, kSortBits = 8;

  // The k best are the keys with (key >> shift_) < prefix_, and the first ties_ with (key >> shift_) == prefix_. They
  // are found digit by digit, from the top.
  void find_cut(int64_t n, int64_t k) {
    const Key* keys = keys_.data();
    candidates_.resize(n + 1);
    prefix_ = 0;
    ties_ = k;
    for (int top = kBits;;) {
      shift_ = std::max(0, top - kSelectBits);
      const Key mask = (Key(1) << (top - shift_)) - 1;
      int64_t counts[1 << kSelectBits] = {};
      for (int64_t i = 0; i < n; ++i) ++counts[(keys[i] >> shift_) & mask];
      Key bin = 0;
      while (counts[bin] < ties_) ties_ -= counts[bin++];
      prefix_ = (top == kBits ? 0 : prefix_ << (top - shift_)) | bin;
      if (shift_ == 0 || counts[bin] == ties_) return;
      int64_t kept = 0;
      for (int64_t i = 0; i < n; ++i) {
        candidates_[kept] = keys[i];
        kept += ((keys[i] >> shift_) & mask) == bin;
      }
      keys = candidates_.data();
      n = kept;
      top = shift_;
    }
  }

  void take_chosen(int64_t n) {
    int64_t place = 0;
    for (int64_t i = 0; i < n; ++i) {
      const Key high = keys_[i] >> shift_;
      const int64_t tie = int64_t(high == prefix_) & int64_t(ties_ > 0);
      chosen_[place] = {keys_[i], i};
      place += int64_t(high < prefix_) | tie;
      ties_ -= tie;
    }
  }

  // Sorts by the lowest digit first. Each sort is stable, so equal keys keep the order of the index.
  void sort_chosen() {
    const int64_t k = int64_t(chosen_.size());
    if (k <= 32) return std::sort(chosen_.begin(), chosen_.end());
    constexpr int digits = kBits / kSortBits, bins = 1 << kSortBits;
    int64_t places[digits][bins] = {};
    for (const auto& item : chosen_)
      for (int digit = 0; digit < digits; ++digit) ++places[digit][(item.key >> (digit * kSortBits)) % bins];
    sorted_.resize(k);
    for (int digit = 0; digit < digits; ++digit) {
      if (places[digit][(chosen_[0].key >> (digit * kSortBits)) % bins] == k) continue;  // all have this one
      int64_t before = 0;
      for (int64_t& place : places[digit]) before += std::exchange(place, before);
      for (const auto& item : chosen_) sorted_[places[digit][(item.key >> (digit * kSortBits)) % bins]++] = item;
      std::swap(chosen_, sorted_);
    }
  }

  std::vector<Key> keys_, candidates_;
  std::vector<Ranked<Key>> chosen_, sorted_;
  Key prefix_;
  int shift_;
  int64_t ties_;
};

std::tuple<Tensor, Tensor> top_k_patches_cpu(const Tensor& relevance_scores, const Tensor& features, int64_t k) {
  check_top_k_patches(relevance_scores, features, k);
  const Tensor scores = as_contiguous(relevance_scores), from = with_whole_rows(features);
  const int64_t batch = scores.size(0), n = scores.size(1), width = features.size(2);
  Tensor selected = allocate(features, {batch, k, width});
  Tensor indices = allocate(scores, {batch, k}, ScalarType::Long);
  if (batch * k == 0) return {selected, indices};
  int64_t* chosen = static_cast<int64_t*>(indices.mutable_data_ptr());
  dispatch_floating(scores.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T* in = static_cast<const T*>(scores.const_data_ptr());
    parallel_rows(batch, n * 8, [&](int64_t begin, int64_t end) {
      RowSelection<T> select;
      for (int64_t b = begin; b < end; ++b) select(in + b * n, n, k, chosen + b * k);
    });
  });
  const RowsOf rows = rows_of(from);
  const int64_t bytes = width * features.element_size();
  char* out = static_cast<char*>(selected.mutable_data_ptr());
  parallel_rows(bytes ? batch * k : 0, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(out + row * bytes, rows.base + row / k * rows.sample_stride + chosen[row] * rows.row_stride, bytes);
  });
  return {selected, indices};
}

Tensor top_k_patches_grad_cpu(const Tensor& grad, const Tensor& indices, int64_t num_patches) {
  check_top_k_patches_grad(grad, indices, num_patches);
  const Tensor from = with_whole_rows(grad), where = as_contiguous(indices);
  const int64_t batch = grad.size(0), k = grad.size(1), width = grad.size(2);
  const int64_t* index = static_cast<const int64_t*>(where.const_data_ptr());
  for (int64_t row = 0; row < batch * k; ++row)
    check(0 <= index[row] && index[row] < num_patches, "top_k_patches_grad: indices must be in [0, ", num_patches,
          "), got ", index[row]);
  Tensor grad_features = torch::stable::new_zeros(grad, {batch, num_patches, width});
  const RowsOf rows = rows_of(from);
  const int64_t bytes = width * grad.element_size();
  char* out = static_cast<char*>(grad_features.mutable_data_ptr());
  parallel_rows(bytes ? batch * k : 0, width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / k;
      std::memcpy(out + (b * num_patches + index[row]) * bytes,
                  rows.base + b * rows.sample_stride + row % k * rows.row_stride, bytes);
    }
  });
  return grad_features;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "top_k_patches(Tensor relevance_scores, Tensor features, SymInt k) -> "
      "(Tensor selected_features, Tensor selected_indices)");
  m.def("top_k_patches_grad(Tensor grad, Tensor indices, SymInt num_patches) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("top_k_patches", TORCH_BOX(&top_k_patches_cpu));
  m.impl("top_k_patches_grad", TORCH_BOX(&top_k_patches_grad_cpu));
}

}  // namespace arr_coc
