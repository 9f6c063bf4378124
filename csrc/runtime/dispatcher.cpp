// Exposes compiled code as dispatcher operators, which torch.ops calls without the GIL.
#include <torch/library.h>

#include <tuple>

#include "package/c_api.h"
#include "package/fork_gate.h"
#include "runtime/code.h"
#include "runtime/handles.h"
#include "runtime/model_impl.h"
#include "runtime/requests.h"
#include "runtime/tried_rows.h"
#include "runtime/weights.h"

namespace exportkit {
namespace {

std::shared_ptr<const Code> code(int64_t handle) {
  auto found = handles<const Code>().get(handle);
  TORCH_CHECK(found, "handle ", handle, " does not belong to an open model");
  return found;
}

CudaGraphs cuda_graphs(const std::string& name) {
  if (name == "first-use") return CudaGraphs::kOnFirstUse;
  return name == "captured" ? CudaGraphs::kCaptured : CudaGraphs::kNone;
}

int64_t open_target(const std::string& library, c10::Device device, int64_t runners, const std::string& graphs,
                    const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
                    const std::vector<int64_t>& written) {
  const Work work;
  TORCH_CHECK(names.size() == tensors.size(), names.size(), " names for ", tensors.size(), " constants");
  Constants constants;
  for (size_t i = 0; i < names.size(); ++i) constants.emplace(names[i], tensors[i]);
  const CodeOptions options{device, runners, cuda_graphs(graphs), written};
  return handles<const Code>().add(std::make_shared<const Code>(library, options, std::move(constants)));
}

std::vector<at::Tensor> copy_together(const std::vector<at::Tensor>& weights, c10::Device device) {
  const Work work;
  return copied_together(weights, device);
}

std::vector<at::Tensor> run(int64_t handle, const std::vector<at::Tensor>& inputs,
                            const std::optional<at::Tensor>& refused) {
  const Work work;
  return code(handle)->run(inputs, refused);
}

std::optional<at::Tensor> session_memory(int64_t handle) { return code(handle)->session_memory(); }

void look(int64_t handle, const std::optional<at::Tensor>& refused) { code(handle)->look(refused); }

std::vector<at::Tensor> capture(int64_t handle, const std::vector<at::Tensor>& arguments, int64_t own) {
  const Work work;
  return code(handle)->capture(arguments, static_cast<size_t>(own));
}

void capture_as(int64_t handle, int64_t other) {
  const Work work;
  code(handle)->capture_as(*code(other));
}

std::string graph_report(int64_t handle) { return code(handle)->graph_report(); }

std::string why_no_graphs() {
  const char* const reason = why_no_cuda_recorder();
  return reason == nullptr ? "" : reason;
}

void close(int64_t handle) {
  const Work work;
  handles<const Code>().remove(handle);
}

std::tuple<std::vector<at::Tensor>, double, double, double, double> run_all(
    int64_t handle, const std::vector<at::Tensor>& tensors, int64_t requests, const std::vector<int64_t>& outputs,
    const std::vector<at::Tensor>& states, const std::vector<int64_t>& written) {
  const Work work;
  Answers answers = run_requests(*code(handle), tensors, requests, outputs, states, written);
  return {std::move(answers.outputs), answers.input_seconds, answers.wait_seconds, answers.run_seconds,
          answers.output_seconds};
}

// `package` is the address of an open ek_package, `methods` has the code of each of its methods.
std::tuple<int64_t, std::string, std::string, bool> try_rows_of(int64_t package, const std::string& target,
                                                                c10::Device device, const std::vector<int64_t>& methods,
                                                                const std::string& name, int64_t most) {
  const Work work;
  CurrentCode::Methods loaded;
  for (const int64_t handle : methods) loaded.push_back(code(handle));
  const PackageReader& reader = reinterpret_cast<const ek_package*>(package)->reader;
  const Model model(std::make_shared<Model::Impl>(reader, target, device, std::move(loaded)));
  const MethodInfo& method = model.method(name);
  TriedRows tried = try_rows(model, method, most);
  const std::string dimension = tried.most > 0 ? method.dimensions[method.row_dimension.value()].name : "";
  return {tried.most, dimension, std::move(tried.reason), tried.bit_equal};
}

}  // namespace

// Registered for all dispatch keys, so that autograd adds nothing to a call.
TORCH_LIBRARY(exportkit, m) {
  m.def(
      "open_target(str library, Device device, int runners, str graphs, str[] names, Tensor[] constants, int[] "
      "written) "
      "-> int",
      open_target);
  m.def("copied_together(Tensor[] weights, Device device) -> Tensor[]", copy_together);
  m.def("run(int handle, Tensor[] inputs, Tensor? refused=None) -> Tensor[]", run);
  m.def("session_memory(int handle) -> Tensor?", session_memory);
  m.def("look(int handle, Tensor? refused=None) -> ()", look);
  m.def("capture(int handle, Tensor[] arguments, int own) -> Tensor[]", capture);
  m.def("capture_as(int handle, int other) -> ()", capture_as);
  m.def("graph_report(int handle) -> str", graph_report);
  m.def("why_no_graphs() -> str", why_no_graphs);
  m.def("close(int handle) -> ()", close);
  m.def(
      "run_requests(int handle, Tensor[] tensors, int requests, int[] outputs, Tensor[] states, int[] written) -> "
      "(Tensor[], float, float, float, float)",
      run_all);
  m.def("try_rows(int package, str target, Device device, int[] methods, str name, int most) -> (int, str, str, bool)",
        try_rows_of);
}

}  // namespace exportkit
