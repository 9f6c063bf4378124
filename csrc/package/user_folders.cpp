#include "package/user_folders.h"

#include <pwd.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

namespace exportkit {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::filesystem::path user_folder(const char* variable, const char* in_home) {
  // The specification says to ignore relative paths.
  if (const std::filesystem::path base = environment(variable); base.is_absolute()) return base / "exportkit";
  std::string home = environment("HOME");
  if (home.empty()) {
    std::array<char, 4096> text{};
    passwd user{}, *found = nullptr;
    getpwuid_r(getuid(), &user, text.data(), text.size(), &found);
    home = found == nullptr ? "~" : found->pw_dir;
  }
  return std::filesystem::path(home) / in_home / "exportkit";
}

}  // namespace exportkit
