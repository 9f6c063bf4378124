// What the C++ reader says of packages, for the tests to compare with what the Python reader says. One line of JSON for
// each path given, or read from standard input, a line each.
#include <iostream>
#include <string>

#include "runtime/package/errors.h"
#include "runtime/package/reader.h"
#include "runtime/tests/json_text.h"

using namespace exportkit;

namespace {

std::string verdict(const std::string& path) {
  try {
    const PackageReader reader(path);
    reader.verify();
    return "{\"ok\": true, \"manifest_sha256\": \"" + reader.manifest_sha256() + "\"}";
  } catch (const Error& error) {
    return "{\"error\": \"" + std::string(error.name()) + "\", \"exit_code\": " + std::to_string(error.exit_code()) +
           ", \"message\": " + json_text(error.what()) + "}";
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) std::cout << verdict(argv[i]) << std::endl;
  if (argc > 1) return 0;
  for (std::string path; std::getline(std::cin, path);) std::cout << verdict(path) << std::endl;
}
