// An operator for each kind of argument: it adds to x a number that tells the argument's values apart, and None from a
// list without elements. Then operators with several arguments, with defaults, and with each kind of results.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <string_view>

namespace {

double number(bool value) { return value ? 3 : 2; }
double number(int64_t value) { return 5 * value + 1; }
double number(double value) { return std::isfinite(value) ? 7 * value : value > 0 ? 71 : value < 0 ? 72 : 73; }
double number(std::string_view value) {
  double sum = value.size();
  for (unsigned char each : value) sum = 3 * sum + each;
  return sum / 1000;
}
double number(const std::string& value) { return number(std::string_view(value)); }
double number(at::ScalarType value) { return 11 + int(value); }
double number(at::Layout value) { return 13 + int(value); }
double number(at::MemoryFormat value) { return 17 + int(value); }
double number(at::Device value) { return 19 + int(value.type()); }
double number(const at::Scalar& value) { return number(value.toComplexDouble().real()) + 100 * int(value.type()); }
double number(const at::Tensor& value) { return value.sum().item<double>(); }
double number(const std::optional<at::Generator>& value) { return value ? 1 : 2; }

template <class T>
double number(at::ArrayRef<T> values);
template <class T>
double number(const std::vector<T>& values);
template <class T>
double number(const c10::List<T>& values);
template <class T>
double number(const std::optional<T>& value) {
  return value ? 1 + number(*value) : 1000;
}

template <class Values>
double all_of(const Values& values) {
  double sum = 10 * values.size();
  for (const auto& each : values) sum = 2 * sum + number(each);
  return sum;
}
template <class T>
double number(at::ArrayRef<T> values) {
  return all_of(values);
}
template <class T>
double number(const std::vector<T>& values) {
  return all_of(values);
}
template <class T>
double number(const c10::List<T>& values) {
  return all_of(values.vec());
}
double number(at::OptionalIntArrayRef values) { return values ? 1 + all_of(*values) : 1000; }

template <class T>
at::Tensor add(const at::Tensor& x, T value) {
  return x + number(value);
}

using MaybeTensors = c10::List<std::optional<at::Tensor>>;

at::Tensor mixed(const at::Tensor& x, std::string_view mode, at::ScalarType dtype, const MaybeTensors& more,
                 std::optional<at::Device> device, const std::optional<at::Tensor>& bias, at::ArrayRef<double> scales,
                 const std::optional<std::vector<at::Tensor>>& rows, int64_t size, bool flip, double eps,
                 std::optional<int64_t> dim, at::IntArrayRef axes, at::MemoryFormat format) {
  const double sum = number(mode) + number(more) + number(device) + number(bias) + number(scales) + number(rows) +
                     number(size) + number(flip) + number(eps) + number(dim) + number(axes) + number(format);
  return (x + sum).to(dtype);
}

std::vector<at::Tensor> copies(const at::Tensor& x, at::IntArrayRef more) {
  std::vector<at::Tensor> found;
  for (int64_t each : more) found.push_back(x + each);
  return found;
}
std::vector<at::Tensor> positive(const at::Tensor& x) { return {x.masked_select(x > 0)}; }
std::tuple<std::vector<at::Tensor>, at::Tensor, std::vector<at::Tensor>> between(const at::Tensor& x,
                                                                                 at::IntArrayRef ignored) {
  return {{x + 1, x + 2}, x + 3, {x + 4}};
}
void add_to(at::Tensor& x, const MaybeTensors& more) { x.add_(number(more)); }

}  // namespace

#define KINDS(EACH)                                                \
  EACH("bool", bool)                                               \
  EACH("int", int64_t)                                             \
  EACH("SymInt", int64_t)                                          \
  EACH("float", double)                                            \
  EACH("str", std::string_view)                                    \
  EACH("ScalarType", at::ScalarType)                               \
  EACH("Layout", at::Layout)                                       \
  EACH("MemoryFormat", at::MemoryFormat)                           \
  EACH("Device", at::Device)                                       \
  EACH("Scalar", const at::Scalar&)                                \
  EACH("Tensor", const at::Tensor&)                                \
  EACH("bool?", std::optional<bool>)                               \
  EACH("int?", std::optional<int64_t>)                             \
  EACH("SymInt?", std::optional<int64_t>)                          \
  EACH("float?", std::optional<double>)                            \
  EACH("str?", std::optional<std::string_view>)                    \
  EACH("ScalarType?", std::optional<at::ScalarType>)               \
  EACH("Layout?", std::optional<at::Layout>)                       \
  EACH("MemoryFormat?", std::optional<at::MemoryFormat>)           \
  EACH("Device?", std::optional<at::Device>)                       \
  EACH("Scalar?", const std::optional<at::Scalar>&)                \
  EACH("Tensor?", const std::optional<at::Tensor>&)                \
  EACH("Generator?", const std::optional<at::Generator>&)          \
  EACH("bool[]", c10::List<bool>)                                  \
  EACH("int[]", at::IntArrayRef)                                   \
  EACH("SymInt[]", at::IntArrayRef)                                \
  EACH("float[]", at::ArrayRef<double>)                            \
  EACH("str[]", std::vector<std::string>)                          \
  EACH("Tensor[]", at::TensorList)                                 \
  EACH("Tensor?[]", const MaybeTensors&)                           \
  EACH("int[]?", at::OptionalIntArrayRef)                          \
  EACH("SymInt[]?", at::OptionalIntArrayRef)                       \
  EACH("float[]?", std::optional<at::ArrayRef<double>>)            \
  EACH("str[]?", const std::optional<std::vector<std::string>>&)   \
  EACH("Tensor[]?", const std::optional<std::vector<at::Tensor>>&) \
  EACH("Tensor?[]?", const std::optional<MaybeTensors>&)

std::string named(std::string kind) {
  for (const auto& [sign, word] : {std::pair("?", "_or_none"), {"[]", "_list"}}) {
    for (size_t at; (at = kind.find(sign)) != kind.npos;) kind.replace(at, std::string_view(sign).size(), word);
  }
  return "of_" + kind;
}

TORCH_LIBRARY(argument_kinds, m) {
#define DEFINE(kind, type) m.def((named(kind) + "(Tensor x, " kind " value) -> Tensor").c_str());
  KINDS(DEFINE)
  m.def(
      "mixed(Tensor x, str mode, ScalarType dtype, Tensor?[] more, Device? device=None, Tensor? bias=None, "
      "float[] scales=[], Tensor[]? rows=None, *, SymInt size=3, bool flip=False, float eps=0.25, int? dim=None, "
      "int[] axes=[1, 2], MemoryFormat format=contiguous_format) -> Tensor");
  m.def("defaults(Tensor x, *, SymInt[] value=[]) -> Tensor");
  m.def("copies(Tensor x, int[] more) -> Tensor[]");
  m.def("positive(Tensor x) -> Tensor[]");
  m.def("between(Tensor x, int[] ignored) -> (Tensor[], Tensor, Tensor[])");
  m.def("add_to(Tensor(a!) x, Tensor?[] more) -> ()");
}

void implement(torch::Library& m) {
#define IMPLEMENT(kind, type) m.impl(named(kind).c_str(), &add<type>);
  KINDS(IMPLEMENT)
  m.impl("mixed", &mixed);
  m.impl("defaults", &add<at::IntArrayRef>);
  m.impl("copies", &copies);
  m.impl("positive", &positive);
  m.impl("between", &between);
  m.impl("add_to", &add_to);
}

TORCH_LIBRARY_IMPL(argument_kinds, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(argument_kinds, CUDA, m) { implement(m); }
