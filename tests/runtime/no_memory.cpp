// Calls each function of the C interface again and again, while the first, second, third ... allocation of the call
// fails, until a call has all that it asks for: no_memory PACKAGE. Prints the number of failures by function.
#include <exportkit/exportkit.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

namespace {

thread_local long allocations_left = -1;  // before one fails; negative: none fails

void* allocate(std::size_t size) {
  if (allocations_left == 0) {
    allocations_left = -1;
    throw std::bad_alloc();
  }
  if (allocations_left > 0) --allocations_left;
  if (void* memory = std::malloc(size > 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}

[[noreturn]] void fail(const char* function, const char* what) {
  std::printf("%s: %s\n", function, what);
  std::exit(1);
}

// `call` takes a place for the error. Whether it succeeds or not, it leaves nothing behind. Where calls are slow, the
// later allocations of one fail further and further apart: `every` says how many do before the distance is 2.
template <class Call>
void try_out(const char* function, const Call& call, long every = 1'000'000) {
  int failures = 0;
  for (long allocations = 0;; allocations += 1 + allocations / every) {
    exportkit_error* error = nullptr;
    allocations_left = allocations;
    const int code = call(&error);
    const bool had_all = allocations_left >= 0;
    allocations_left = -1;
    if (code != exportkit_error_code(error)) fail(function, "the code is not the error's");
    if (code != EXPORTKIT_OK && *exportkit_error_message(error) == '\0') fail(function, "the error says nothing");
    exportkit_error_free(error);
    if (had_all && code != EXPORTKIT_OK) fail(function, "it fails with all the memory it wants");
    if (had_all) break;
    failures += code != EXPORTKIT_OK;
  }
  std::printf("%s %d\n", function, failures);
}

// Gives memory, and counts those that have ended in `context`.
int place(size_t, size_t, DLDataType, int32_t, const int64_t*, uint64_t bytes, void** data, DLDevice* device, void*) {
  static char memory[1 << 20];
  if (bytes > sizeof memory) return -1;
  *data = memory, *device = {kDLCPU, 0};
  return 1;
}
void count(size_t, void* context) { ++*static_cast<int*>(context); }

// Runs a request twice in one call. The error is that of all, or of one of them.
int run_requests(exportkit_model model, const std::vector<exportkit_request_input>& inputs, exportkit_error** error) {
  int ended = 0;
  exportkit_request one{sizeof one, inputs.size(), inputs.data(), 0, nullptr}, two = one;
  exportkit_request* const requests[] = {&one, &two};
  const exportkit_answers answers{sizeof answers, place, count, &ended};
  const int code = exportkit_run_requests(model, nullptr, requests, 2, 8, &answers, nullptr, error);
  if (ended != (code == EXPORTKIT_OK ? 2 : 0)) fail("run_requests", "not all have ended, or one that did not begin");
  if (code != EXPORTKIT_OK) return code;
  *error = one.error != nullptr ? one.error : two.error;
  if (one.error != nullptr) exportkit_error_free(two.error);
  return exportkit_error_code(*error);
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int, char** arguments) {
  using Tensors = std::vector<DLManagedTensorVersioned*>;
  const auto release = [](Tensors& tensors, int code) {
    for (DLManagedTensorVersioned*& tensor : tensors) {
      if ((tensor == nullptr) == (code == EXPORTKIT_OK))
        fail("outputs", "they are there if and only if the call failed");
      if (tensor != nullptr) tensor->deleter(tensor);
      tensor = nullptr;
    }
    return code;
  };
  exportkit_model model;
  const exportkit_description* about;
  if (exportkit_open(arguments[1], nullptr, &model, nullptr) != EXPORTKIT_OK) fail("open", "it fails");
  try_out("describe", [&](exportkit_error** error) { return exportkit_describe(model, &about, error); });
  Tensors inputs(about->input_count), outputs(about->output_count), given(about->input_count);
  exportkit_read_case(model, 0, given.data(), given.size(), nullptr, 0, nullptr);
  std::vector<const DLTensor*> views;
  for (const DLManagedTensorVersioned* tensor : given) views.push_back(&tensor->dl_tensor);

  try_out("read_case", [&](exportkit_error** error) {
    const int code = exportkit_read_case(model, 0, inputs.data(), inputs.size(), outputs.data(), outputs.size(), error);
    release(inputs, code);
    return release(outputs, code);
  });
  try_out("run", [&](exportkit_error** error) {
    return release(outputs,
                   exportkit_run(model, views.data(), views.size(), outputs.data(), outputs.size(), nullptr, error));
  });
  std::vector<exportkit_piece> pieces(given.size());
  std::vector<exportkit_request_input> wanted;
  for (size_t i = 0; i < given.size(); ++i) {
    const DLTensor& tensor = *views[i];
    uint64_t bytes = tensor.dtype.bits / 8;
    for (int32_t axis = 0; axis < tensor.ndim; ++axis) bytes *= static_cast<uint64_t>(tensor.shape[axis]);
    pieces[i] = {tensor.data, bytes, tensor.device};
    wanted.push_back({tensor.dtype, tensor.ndim, tensor.shape, 1, &pieces[i]});
  }
  try_out("run_requests", [&](exportkit_error** error) { return run_requests(model, wanted, error); });
  try_out("replay", [&](exportkit_error** error) { return exportkit_replay(model, 0, error); }, 100);
  try_out(
      "open",
      [&](exportkit_error** error) {
        exportkit_model another;
        const int code = exportkit_open(arguments[1], nullptr, &another, error);
        if ((another == 0) == (code == EXPORTKIT_OK)) fail("open", "a model is there if and only if the call failed");
        if (another != 0) exportkit_close(another, nullptr);
        return code;
      },
      20);
  release(given, EXPORTKIT_OK);
  return exportkit_close(model, nullptr);
}
