// The command line of exportkit-run.
#pragma once

#include <map>
#include <string>

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

}  // namespace exportkit::run
