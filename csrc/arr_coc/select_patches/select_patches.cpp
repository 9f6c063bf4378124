#include "arr_coc/select_patches/select_patches.h"

#include <torch/csrc/stable/library.h>

#include "arr_coc/common/map.h"

namespace arr_coc {
namespace {

template <class A>
struct Gate {
  A score;
  ARR_COC_FUNCTION A operator()(A x) const { return x * score; }
};

}  // namespace

template <class T>
void run(const Cpu& device, const SelectPatches<T>& call) {
  const TopKPatches<T>& of = call.selection;
  select_best(of.scores, of.indices, of.batch, of.n, of.k);
  const int64_t width = of.row_bytes / int64_t(sizeof(T));
  const float rows = float(call.rows), columns = float(call.columns);
  parallel_rows(of.batch * of.k, width + 16, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t sample = place / of.k, index = of.indices[place], row = index / call.columns;
      const T score = of.scores[sample * of.n + index];
      call.scores[place] = score;
      call.positions[2 * place] = (float(row) + 0.5f) / rows;
      call.positions[2 * place + 1] = (float(index - row * call.columns) + 0.5f) / columns;
      map_here(Gate<accumulate_t<T>>{load(score)}, reinterpret_cast<T*>(of.to.base + place * of.row_bytes), width,
               reinterpret_cast<const T*>(of.from.row(sample, index)));
    }
  });
  run(device, call.budgets);
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def(
      "select_patches(Tensor relevance_scores, Tensor features, SymInt k, SymInt rows, SymInt columns, "
      "SymInt min_tokens=64, SymInt max_tokens=400, float gamma=1.0, SymInt? total=None) -> "
      "(Tensor selected_features, Tensor selected_indices, Tensor tokens, Tensor selected_scores, Tensor positions)");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("select_patches", TORCH_BOX(&select_patches<Cpu>)); }

}  // namespace arr_coc
