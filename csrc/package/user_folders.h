// Where a user keeps what: the XDG base directory specification.
#pragma once

#include <filesystem>
#include <string>

namespace exportkit {

// A variable of the environment; empty where there is none.
std::string environment(const char* name);

// exportkit's folder under the one that a variable names, such as XDG_CACHE_HOME, or under a folder of the user's home,
// such as .cache.
std::filesystem::path user_folder(const char* variable, const char* in_home);

}  // namespace exportkit
