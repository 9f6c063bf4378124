// What the parts of exportkit-run share: its command line, and texts and JSON of what it prints.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "exportkit/runtime.h"

namespace exportkit::run {

struct Options {
  std::string package;
  OpenOptions open;
  std::string method;                  // empty: all recorded cases, or the model's default method
  std::string input, output, weights;  // safetensors files
  std::map<std::string, int64_t> session_sizes;
  double bench_seconds = 0;  // 0: no bench
  int64_t threads = 1;
  bool json = false;
  bool help = false;
};

// UsageError.
Options parse(int argc, char** argv);

extern const char* const kHelp;

// JSON has no infinity.
std::string number(const std::optional<double>& value);
std::string text_or_null(const std::string& text);

// Such as "batch=2, gh=28".
std::string shown(const std::map<std::string, int64_t>& sizes);
// Such as "image: float32[batch, 3, 16*gh], query: float32[batch]".
std::string shown(const std::vector<TensorInfo>& tensors);

std::string to_json(const OutputReport& output);
std::string to_json(const CallReport& call);

// Text on one line without terminal control codes: unprintable characters become escapes such as \x1b. Needed because a
// package's text is untrusted.
std::string printable(std::string_view text);

}  // namespace exportkit::run
