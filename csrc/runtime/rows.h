// Which methods may get the rows of several requests in one call, by what the manifest says.
#pragma once

#include <optional>
#include <string>

#include "package/manifest.h"

namespace exportkit {

// The dimension that is the first size of every input, every output and all state of a method, and no other size, as an
// index of its dimensions; or why there is none.
struct RowRule {
  std::optional<size_t> dimension;
  std::string reason;
};

RowRule row_rule(const Manifest& manifest, const Method& method);

}  // namespace exportkit
