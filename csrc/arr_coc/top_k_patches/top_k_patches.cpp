#include "arr_coc/top_k_patches/top_k_patches.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <utility>
#include <vector>

#include "arr_coc/common/cpu.h"
#include "arr_coc/common/ordered_key.h"

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

}  // namespace

template <class T>
void select_best(const T* scores, int64_t* indices, int64_t batch, int64_t n, int64_t k) {
  parallel_rows(batch, n * 8, [&](int64_t begin, int64_t end) {
    RowSelection<T> select;
    for (int64_t b = begin; b < end; ++b) select(scores + b * n, n, k, indices + b * k);
  });
}

template void select_best(const float*, int64_t*, int64_t, int64_t, int64_t);
template void select_best(const double*, int64_t*, int64_t, int64_t, int64_t);
template void select_best(const Half*, int64_t*, int64_t, int64_t, int64_t);
template void select_best(const BFloat16*, int64_t*, int64_t, int64_t, int64_t);

template <class T>
void run(const Cpu&, const TopKPatches<T>& call) {
  const int64_t k = call.k, bytes = call.row_bytes;
  select_best(call.scores, call.indices, call.batch, call.n, k);
  const int64_t* chosen = call.indices;
  const RowsOf from = call.from, to = call.to;
  parallel_rows(bytes ? call.batch * k : 0, bytes / 4, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(to.base + row * bytes, from.row(row / k, chosen[row]), bytes);
  });
}

void run(const Cpu&, const TopKPatchesGrad& call) {
  const int64_t k = call.k, bytes = call.row_bytes;
  for (int64_t row = 0; row < call.batch * k; ++row)
    check(0 <= call.indices[row] && call.indices[row] < call.n, "top_k_patches_grad: indices must be in [0, ", call.n,
          "), got ", call.indices[row]);
  if (bytes == 0) return;
  parallel_rows(call.batch * call.n, bytes / 4, [&](int64_t begin, int64_t end) {
    std::memset(call.to.base + begin * bytes, 0, (end - begin) * bytes);
  });
  parallel_rows(call.batch * k, bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      std::memcpy(call.to.row(row / k, call.indices[row]), call.from.row(row / k, row % k), bytes);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "top_k_patches(Tensor relevance_scores, Tensor features, SymInt k) -> "
      "(Tensor selected_features, Tensor selected_indices)");
  m.def("top_k_patches_grad(Tensor grad, Tensor indices, SymInt num_patches) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) {
  m.impl("top_k_patches", TORCH_BOX(&top_k_patches<Cpu>));
  m.impl("top_k_patches_grad", TORCH_BOX(&top_k_patches_grad<Cpu>));
}

}  // namespace arr_coc
