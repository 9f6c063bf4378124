// A user's folders, by the XDG base directory specification.
#pragma once

#include <filesystem>
#include <string>

namespace exportkit {

// An environment variable; empty if it is not set.
std::string environment(const char* name);

// exportkit's folder under the folder that a variable such as XDG_CACHE_HOME names, or under a folder of the user's
// home, such as .cache.
std::filesystem::path user_folder(const char* variable, const char* in_home);

}  // namespace exportkit
