// Runs the first recorded call of a package as several requests, in pieces of memory of exactly their size, and
// compares each answer with that of a call alone: requests PACKAGE. Built with sanitizers, it ends where memory is
// misused.
#include <exportkit/exportkit.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace {

constexpr size_t kRequests = 5;
constexpr int64_t kMost = 1 << 20;

void check(int code, exportkit_error* error) {
  if (code == EXPORTKIT_OK) return;
  std::printf("%s\n", exportkit_error_message(error));
  std::exit(1);
}

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  std::exit(1);
}

size_t bytes_of(const DLTensor& tensor) {
  size_t bytes = tensor.dtype.bits / 8;
  for (int32_t axis = 0; axis < tensor.ndim; ++axis) bytes *= static_cast<size_t>(tensor.shape[axis]);
  return bytes;
}

using Memory = std::vector<std::unique_ptr<char[]>>;

// Two pieces of an input, which end where the memory ends.
std::vector<exportkit_piece> cut(const DLTensor& tensor, size_t at, Memory& memory) {
  const size_t bytes = bytes_of(tensor), first = at < bytes ? at : bytes;
  std::vector<exportkit_piece> pieces;
  for (const auto& [begin, size] : {std::pair(size_t{0}, first), std::pair(first, bytes - first)}) {
    memory.emplace_back(new char[size]);
    std::memcpy(memory.back().get(), static_cast<const char*>(tensor.data) + begin, size);
    pieces.push_back({memory.back().get(), size, {kDLCPU, 0}});
  }
  return pieces;
}

struct Answers {
  std::map<std::pair<size_t, size_t>, std::pair<std::unique_ptr<char[]>, size_t>> outputs;
  size_t ended = 0;
};

int place(size_t request, size_t output, DLDataType, int32_t, const int64_t*, uint64_t bytes, void** data, DLDevice*,
          void* context) {
  auto& made = static_cast<Answers*>(context)->outputs[{request, output}];
  check(made.first == nullptr, "place is asked twice");
  made = {std::unique_ptr<char[]>(new char[bytes]), bytes};
  *data = made.first.get();
  return 1;
}

void ended(size_t, void* context) { ++static_cast<Answers*>(context)->ended; }

}  // namespace

int main(int, char** arguments) {
  exportkit_error* error = nullptr;
  exportkit_model model;
  const exportkit_description* about;
  check(exportkit_open(arguments[1], nullptr, &model, &error), error);
  check(exportkit_describe(model, &about, &error), error);
  const exportkit_method_info& method = *about->methods[about->cases[0]->calls[0]->method];
  std::vector<DLManagedTensorVersioned*> given(method.input_count), alone(method.output_count);
  check(exportkit_read_call(model, 0, 0, given.data(), given.size(), nullptr, 0, &error), error);

  Memory memory;
  std::vector<const DLTensor*> views;
  std::vector<exportkit_session> sessions(kRequests + 1);
  std::vector<std::vector<exportkit_piece>> pieces;
  std::vector<std::vector<exportkit_request_input>> inputs(kRequests);
  std::vector<exportkit_request> requests(kRequests);
  std::vector<exportkit_request*> pointers;
  for (const DLManagedTensorVersioned* tensor : given) views.push_back(&tensor->dl_tensor);
  const exportkit_size rows = {"batch", views[0]->shape[0]};
  for (exportkit_session& session : sessions) {
    if (method.stateful) check(exportkit_open_session(model, &rows, 1, &session, &error), error);
  }
  for (size_t i = 0; i < kRequests; ++i) {
    for (const DLTensor* view : views) pieces.push_back(cut(*view, 3 * i, memory));
  }
  for (size_t i = 0; i < kRequests; ++i) {
    for (size_t k = 0; k < views.size(); ++k) {
      const auto& own = pieces[i * views.size() + k];
      inputs[i].push_back({views[k]->dtype, views[k]->ndim, views[k]->shape, own.size(), own.data()});
    }
    requests[i] = {sizeof requests[i], inputs[i].size(), inputs[i].data(), sessions[i], nullptr};
    pointers.push_back(&requests[i]);
  }
  const exportkit_run_options compact = {sizeof compact, EXPORTKIT_CONTIGUOUS_OUTPUTS, nullptr};
  const int code = method.stateful ? exportkit_session_run(sessions[kRequests], method.name, views.data(), views.size(),
                                                           alone.data(), alone.size(), &compact, &error)
                                   : exportkit_run_method(model, method.name, views.data(), views.size(), alone.data(),
                                                          alone.size(), &compact, &error);
  check(code, error);
  for (const int64_t most : {int64_t{0}, kMost}) {
    Answers answers;
    const exportkit_answers where = {sizeof where, place, ended, &answers};
    check(exportkit_run_requests(model, method.name, pointers.data(), kRequests, most, &where, nullptr, &error), error);
    check(answers.ended == kRequests, "not all have ended");
    for (size_t i = 0; i < kRequests; ++i) {
      check(exportkit_error_code(requests[i].error), requests[i].error);
      for (size_t k = 0; k < alone.size(); ++k) {
        const auto& [data, bytes] = answers.outputs.at({i, k});
        check(bytes == bytes_of(alone[k]->dl_tensor), "an answer has another size than alone");
        check(std::memcmp(data.get(), alone[k]->dl_tensor.data, bytes) == 0, "an answer is another one than alone");
      }
      if (method.stateful) check(exportkit_session_reset(sessions[i], &error), error);
    }
  }
  for (auto* tensors : {&given, &alone}) {
    for (DLManagedTensorVersioned* tensor : *tensors) tensor->deleter(tensor);
  }
  std::printf("%zu requests of %s\n", kRequests, method.name);
  check(exportkit_close(model, &error), error);
}
