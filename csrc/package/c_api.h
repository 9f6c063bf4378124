// Private helpers of the functions in package.h.
#pragma once

#include <string>
#include <vector>

#include "package/errors.h"
#include "package/fork_gate.h"
#include "package/json.h"
#include "package/package.h"
#include "package/safetensors.h"
#include "package/trust.h"

struct ek_package {
  exportkit::PackageReader reader;
  std::string signers;  // as JSON
};

namespace exportkit::c_api {

// Stores the exception being handled as this thread's error; returns -1.
int note_failure();

// Runs a function's work and turns exceptions into this thread's error.
template <class F>
int guarded(const F& work) noexcept {
  const Work uncut;
  try {
    work();
    return 0;
  } catch (...) {
    return note_failure();
  }
}

// A warning for ek_take_warnings.
void warn(const std::string& warning);
// Stores a text until this thread's next call.
void answer(ek_text* out, std::string text);
ek_text view(const std::string& text);

// Tensors of a file that the caller reads: a list of {"name", "dtype", "shape"}.
std::vector<safetensors::Place> read_places(JsonReader& json);
SignatureRequest request_of(const ek_demand& demand);
std::string key_json(const PublicKey& key);

}  // namespace exportkit::c_api
