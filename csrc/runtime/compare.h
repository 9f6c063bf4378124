// Recorded cases, and the comparison of new results with recorded ones, by the rules of exportkit/verify/compare.py.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "exportkit/runtime.h"
#include "package/manifest.h"
#include "package/reader.h"
#include "runtime/methods.h"

namespace exportkit {

// FORMAT.md has the rule, under "Verdicts".
class Comparison {
 public:
  // `manifest` must outlive this object.
  explicit Comparison(const Manifest& manifest);

  // Compares a call's outputs, and the recorded inputs that it has written, with what was recorded.
  CallReport compare(const RecordedCall& recorded, const std::vector<at::Tensor>& outputs) const;
  // Compares the state after the last call. Nothing if it was not recorded.
  std::vector<OutputReport> compare_state(const RecordedCase& recorded,
                                          const std::vector<std::pair<std::string, at::Tensor>>& state) const;

 private:
  const Manifest& manifest_;
  std::map<std::string, std::map<std::string, Accuracy>> accuracy_;  // eager's, by method and result
  std::map<std::string, Accuracy> state_accuracy_;
};

// Reads a case and moves it to a device: CaseError, DigestMismatchError.
RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device);

// The sizes of a session in which a recorded case can run.
Sizes session_sizes(const Model& model, const RecordedCase& recorded);

}  // namespace exportkit
