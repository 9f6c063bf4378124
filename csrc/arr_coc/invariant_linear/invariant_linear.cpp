#include "arr_coc/invariant_linear/invariant_linear.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "arr_coc/common/convert.h"

namespace arr_coc {
namespace {

constexpr int64_t kPanel = 16;     // columns, whose weights lie side by side
constexpr int64_t kGroup = 6;      // rows whose sums of a panel fit a processor's registers
constexpr int64_t kRowBlock = 48;  // rows that stay in the caches while panels change

// Copies up to kPanel columns of weights into a panel, [in, kPanel]. Columns that are missing become zero.
template <class T, class A>
void pack(const T* weight, int64_t in, int64_t columns, A* panel) {
  std::vector<A> buffer;
  std::fill(panel, panel + in * kPanel, A(0));
  for (int64_t c = 0; c < columns; ++c) {
    const A* row = accumulated(weight + c * in, in, buffer);
    for (int64_t k = 0; k < in; ++k) panel[k * kPanel + c] = row[k];
  }
}

// Adds up products [begin, end) of kGroup rows and a panel, one fused multiply-add each, and adds them to the sums,
// which are zero before the `first` part.
template <class A>
ARR_COC_EVERY_ISA void add_part(const A* const* rows, const A* panel, int64_t begin, int64_t end, bool first,
                                A (*sums)[kPanel]) {
  A part[kGroup][kPanel] = {};
  for (int64_t k = begin; k < end; ++k)
    for (int64_t r = 0; r < kGroup; ++r)
#pragma omp simd
      for (int64_t c = 0; c < kPanel; ++c) part[r][c] = std::fma(rows[r][k], panel[k * kPanel + c], part[r][c]);
  for (int64_t r = 0; r < kGroup; ++r)
#pragma omp simd
    for (int64_t c = 0; c < kPanel; ++c) sums[r][c] = (first ? A(0) : sums[r][c]) + part[r][c];
}

// Adds the bias and stores `rows` rows of a panel that has kPanel columns.
template <class T, class A>
ARR_COC_EVERY_ISA void store_panel(const A (*sums)[kPanel], const A* bias, T* out, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r, out += width)
#pragma omp simd
    for (int64_t c = 0; c < kPanel; ++c) out[c] = store<T>(sums[r][c] + bias[c]);
}

template <class T, class A>
void store_columns(const A (*sums)[kPanel], const A* bias, T* out, int64_t rows, int64_t columns, int64_t width) {
  if (columns == kPanel) return store_panel(sums, bias, out, rows, width);
  for (int64_t r = 0; r < rows; ++r, out += width)
    for (int64_t c = 0; c < columns; ++c) out[c] = store<T>(sums[r][c] + bias[c]);
}

}  // namespace

template <class T>
void run(const Cpu&, const InvariantLinear<T>& call) {
  using A = accumulate_t<T>;
  const int64_t panels = (call.width + kPanel - 1) / kPanel, blocks = (call.rows + kRowBlock - 1) / kRowBlock;
  std::vector<A> packed(panels * kPanel * call.in);
  std::vector<A> bias(panels * kPanel);  // never -0, so that a sum of -0 is 0, as on a GPU
  for (int64_t c = 0; call.bias && c < call.width; ++c) bias[c] = A(0) + A(load(call.bias[c]));
  parallel_rows(panels, kPanel * call.in, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      pack(call.weight + p * kPanel * call.in, call.in, std::min(kPanel, call.width - p * kPanel),
           &packed[p * kPanel * call.in]);
  });
  parallel_rows(blocks * panels, kRowBlock * call.in, [&](int64_t begin, int64_t end) {
    std::vector<A> rows;
    const A* x = nullptr;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / panels * kRowBlock, column = task % panels * kPanel;
      const int64_t count = std::min(kRowBlock, call.rows - first), columns = std::min(kPanel, call.width - column);
      if (task == begin || column == 0) x = accumulated(call.x + first * call.in, count * call.in, rows);
      for (int64_t group = 0; group < count; group += kGroup) {
        A sums[kGroup][kPanel];
        const A* group_rows[kGroup];  // the last may repeat one
        for (int64_t r = 0; r < kGroup; ++r) group_rows[r] = x + std::min(group + r, count - 1) * call.in;
        for (int64_t k = 0; k == 0 || k < call.in; k += call.order.part_length)
          add_part(group_rows, &packed[column * call.in], k, std::min(k + call.order.part_length, call.in), k == 0,
                   sums);
        store_columns(sums, &bias[column], call.out + (first + group) * call.width + column,
                      std::min(kGroup, count - group), columns, call.width);
      }
    }
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(arr_coc, m) {
  m.def("invariant_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(arr_coc, CPU, m) { m.impl("invariant_linear", TORCH_BOX(&invariant_linear<Cpu>)); }

}  // namespace arr_coc
