// Finds out who can change a file or a folder. We trust files that only root and the current user can change.
#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <string>

namespace exportkit {

// Why another user can change a file or the contents of a folder, such as "is a link". Null if nobody else can.
const char* others_may_change(const struct stat& status);

// Whether another user could put another file or folder into the place of one with this path, which has no links: by
// renaming what is on the way to it. Why, or nothing if none can; it completes "it ...".
std::string others_may_replace(const std::filesystem::path& path);

}  // namespace exportkit
