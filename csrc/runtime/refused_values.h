// What compiled code says of values that it refused, such as an index out of range (docs/adr/0074).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace exportkit {

// Begins the message of the error of a call that met such a value. exportkit/package/compiled_with.py has it, too.
inline constexpr char kRefusedValue[] = "refused value: ";

// The memory in which a code's calls write what they refused. A call on a CPU has its own. On a GPU, where nobody waits
// for a call, the calls of one stream share it, or those of one session: it lies in pinned memory, so that looking at
// it costs no copy. Any number of threads may use an object.
class RefusedValues {
 public:
  // `library` is the code's, which torch has loaded.
  RefusedValues(const std::filesystem::path& library, c10::Device device);
  RefusedValues(const RefusedValues&) = delete;
  RefusedValues& operator=(const RefusedValues&) = delete;

  // Whether the code takes such memory, as its last argument.
  bool expected() const { return arguments_.has_value(); }
  // The number of its arguments before that.
  size_t arguments() const { return arguments_.value(); }

  // Memory for a call on a CPU, or for a session on a GPU. Nobody else has it until `give_back`.
  at::Tensor take() const;
  void give_back(at::Tensor memory) const;
  // The memory of the current stream of a GPU.
  at::Tensor of_stream() const;
  // Throws c10::Error if a call has refused a value, and forgets it.
  void look(const at::Tensor& memory) const;

 private:
  struct Place {
    std::string kind, operators;
  };
  std::string message(const int64_t* memory) const;

  const c10::Device device_;
  std::optional<size_t> arguments_;
  std::vector<Place> places_;
  mutable std::mutex mutex_;  // guards what follows
  mutable std::vector<at::Tensor> free_;
  mutable std::map<int64_t, at::Tensor> streams_;
};

}  // namespace exportkit
