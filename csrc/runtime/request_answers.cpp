#include "runtime/request_answers.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "package/errors.h"
#include "runtime/c_api_errors.h"
#include "runtime/dlpack_tensors.h"
#include "runtime/request_inputs.h"

namespace exportkit {

RequestAnswers::RequestAnswers(const MethodInfo& method, std::vector<at::Tensor> outputs, c10::Device device,
                               const exportkit_answers& answers)
    : method_(method),
      outputs_(std::move(outputs)),
      fetched_(outputs_.size()),
      device_(device),
      answers_(answers),
      on_device_(device) {
  for (at::Tensor& output : outputs_) output = output.resolve_conj().resolve_neg().contiguous();
}

void RequestAnswers::place(size_t request, int64_t first, int64_t rows) {
  for (size_t output = 0; output < outputs_.size(); ++output) place_output(request, output, first, rows);
}

void RequestAnswers::place_output(size_t request, size_t output, int64_t first, int64_t rows) {
  const at::Tensor& whole = outputs_[output];
  std::vector<int64_t> shape = whole.sizes().vec();
  Copy copy{output, 0, whole.nbytes(), nullptr};
  if (rows >= 0) {
    const uint64_t row = shape[0] > 0 ? whole.nbytes() / static_cast<uint64_t>(shape[0]) : 0;
    copy.offset = static_cast<uint64_t>(first) * row, copy.bytes = static_cast<uint64_t>(rows) * row;
    shape[0] = rows;
  }
  DLDevice place{kDLCPU, 0};
  const int wanted = answers_.place(request, output, dl_dtype(whole.scalar_type()), static_cast<int32_t>(shape.size()),
                                    shape.data(), copy.bytes, &copy.to, &place, answers_.context);
  const std::string what = "`" + method_.outputs[output].name + "` of request " + std::to_string(request);
  if (wanted < 0) {
    throw Error(kMemory, "there is no memory for " + what + ": place returned " + std::to_string(wanted));
  }
  if (wanted == 0 || copy.bytes == 0) return;
  const c10::Device device = device_of(place, "the place of " + what, device_);
  not_null(copy.to, ("the place of " + what).c_str());
  if (device.is_cpu()) {
    copies_.push_back(copy);
    return;
  }
  bytes_at(copy.to, copy.bytes, device_);
  on_device_.add(copy.to, static_cast<const char*>(whole.const_data_ptr()) + copy.offset, copy.bytes);
}

void RequestAnswers::begin() {
  for (const Copy& copy : copies_) on_cpu(copy.output);
  on_device_.begin();
}

// Brings an output to memory of the CPU, where it is once the current stream was waited for.
void RequestAnswers::on_cpu(size_t output) {
  at::Tensor& fetched = fetched_[output];
  const at::Tensor& made = outputs_[output];
  if (fetched.defined()) return;
  if (made.is_cpu()) {
    fetched = made;
    return;
  }
  fetched = at::empty(made.sizes(), at::TensorOptions(made.scalar_type()).pinned_memory(true));
  fetched.copy_(made, /*non_blocking=*/true);
}

void RequestAnswers::finish() const {
  for (const Copy& copy : copies_) {
    std::memcpy(copy.to, static_cast<const char*>(fetched_[copy.output].const_data_ptr()) + copy.offset, copy.bytes);
  }
}

}  // namespace exportkit
