// Finds out who can change a file or a folder. We trust files that only root and the current user can change.
#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <string>

namespace exportkit {

// Why another user can change a file or the contents of a folder, such as "is a link". Null if nobody else can.
const char* others_may_change(const struct stat& status);

// Why another user can replace the file or folder at this path, which has no links, by renaming a folder above it.
// The text completes "it ..."; it is empty if nobody else can.
std::string others_may_replace(const std::filesystem::path& path);

}  // namespace exportkit
