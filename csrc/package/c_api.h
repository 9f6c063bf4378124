// What the functions of package.h share; nothing for others to include.
#pragma once

#include <string>
#include <vector>

#include "package/errors.h"
#include "package/fork_gate.h"
#include "package/package.h"
#include "package/reader.h"

struct ek_package {
  exportkit::PackageReader reader;
  std::string signers;  // as JSON
};

namespace exportkit::c_api {

// Notes the exception that is being handled as this thread's error; gives -1.
int note_failure();

// Does the work of a function: no exception leaves it.
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

const ek_error* last_error();

// What ek_take_warnings gives, and forgets.
ek_text taken_warnings();
void warn(const std::string& warning);
// Keeps a text for this thread until its next call.
void answer(ek_text* out, std::string text);
ek_text view(const std::string& text);

SignatureRequest request_of(const ek_demand& demand);
std::string json(bool value);
std::string json(const PublicKey& key);
std::string json(const std::vector<PublicKey>& keys);

}  // namespace exportkit::c_api
