// The user's folders, and who can change a file or a folder. We trust files that only root and the current user can
// change.
#pragma once

#include <sys/stat.h>

#include <filesystem>
#include <optional>
#include <string>

namespace exportkit {

// Why another user can change a file or the contents of a folder, such as "is a link". Null if nobody else can.
const char* others_may_change(const struct stat& status);

struct Followed {
  std::filesystem::path path;  // without links
  std::string reason;          // completes "it ..."; empty if nobody else can put something else there
};

// Follows the links of a path, whose end need not exist. Stops with a reason at the first link that another user made,
// and at the first folder in which another user can rename what comes next. FileError.
Followed follow(const std::filesystem::path& path);

// An environment variable; empty if it is not set.
std::string environment(const char* name);

// exportkit's folder under the folder that a variable such as XDG_CACHE_HOME names, or under a folder of the user's
// home, such as .cache.
std::filesystem::path user_folder(const char* variable, const char* in_home);

inline constexpr size_t kSmallFileBytes = size_t{64} << 10;

// Returns a file's content, or nothing if there is no file. Throws std::system_error if it cannot be read, and
// std::invalid_argument, such as "is not a plain file", if it is refused: it is no plain file, it is too large, or,
// with `guarded`, other users can change or replace it.
std::optional<std::string> read_limited(const std::filesystem::path& path, bool guarded = false,
                                        size_t most = kSmallFileBytes);

// Returns what is wrong with a file, such as "cannot be read: Permission denied". Call it in a `catch` around
// `read_limited` or a JsonReader. It rethrows other exceptions.
std::string file_problem();

// Returns the content of a signature file, unchecked, or nothing if there is no file. Throws SignatureError if it is
// too large or not a plain file, and UsageError if it cannot be read.
std::optional<std::string> read_signature_file(const std::filesystem::path& file);

}  // namespace exportkit
