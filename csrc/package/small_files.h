// Reads small untrusted files: signatures, keys and policies.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace exportkit {

inline constexpr size_t kSmallFileBytes = size_t{64} << 10;

// Reads a file of at most so many bytes; nothing if there is no file. If `guarded`, refuses a file that other users can
// change or replace. std::system_error if it cannot be read; std::invalid_argument, such as "is not a plain file", if
// it is refused.
std::optional<std::string> read_limited(const std::filesystem::path& path, bool guarded = false,
                                        size_t most = kSmallFileBytes);

// Says what is wrong with a file, such as "cannot be read: Permission denied". Call it where you catch an exception of
// `read_limited` or of a JsonReader. It rethrows any other.
std::string file_problem();

// Reads a signature file of either form without checking it; nothing if there is no file. SignatureError if it is too
// large or not a plain file; UsageError if it cannot be read.
std::optional<std::string> read_signature_file(const std::filesystem::path& file);

}  // namespace exportkit
