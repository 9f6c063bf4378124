// A package, opened on a device.
#pragma once

#include <exportkit/exportkit.h>

#include <memory>
#include <string>
#include <vector>

#include "triton/config.h"
#include "triton/sequences.h"

namespace exportkit::triton {

// A size of a new session's state: that of an input of the first step, or a fixed one.
struct StateSize {
  const char* name;
  const exportkit_size_range* axis;  // null: `fixed`
  size_t input;
  int32_t place;
  int64_t fixed;
};

// What the model keeps for its instances on the device.
class Copy {
 public:
  // `public_keys`: one of them must have signed the package. Failure.
  Copy(const std::string& path, const std::string& device, const ModelConfig& config,
       const std::vector<std::string>& public_keys);
  ~Copy();
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

  exportkit_model handle() const { return handle_; }
  const exportkit_method_info& method() const { return *method_; }
  const DLDevice& device() const { return about_->dl_device; }
  // How many requests may be in a call, of up to so many rows.
  Served try_rows(int64_t most) const;
  // How large the state of a sequence is that begins with these inputs. Failure.
  std::vector<exportkit_size> state_sizes(const std::vector<exportkit_request_input>& inputs) const;
  // One line about the package.
  std::string text() const;

  std::unique_ptr<Sequences> sequences;  // of a method with state

 private:
  void open(const std::string& path, const std::string& device, const ModelConfig& config,
            const std::vector<std::string>& public_keys);
  void choose_method(const ModelConfig& config);
  void find_state_sizes();
  void replay() const;

  exportkit_model handle_ = 0;
  const exportkit_description* about_ = nullptr;
  const exportkit_method_info* method_ = nullptr;
  std::vector<StateSize> state_sizes_;
};

}  // namespace exportkit::triton
