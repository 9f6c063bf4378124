// Reading files of which no more is known than that they are small: signatures, keys,
// policies.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace exportkit {

// A file of at most 64 KiB; nothing where there is none. A guarded one must be such that other users can neither change
// nor replace it. std::system_error where it cannot be read, std::invalid_argument where it is no plain file, too
// large, or not guarded: "is not a plain file".
std::optional<std::string> read_limited(const std::filesystem::path& path, bool guarded = false);

// A signature file of either form, as it is; nothing where there is none. SignatureError where it is no plain file or
// too large, UsageError where it may not be read.
std::optional<std::string> read_signature_file(const std::filesystem::path& file);

}  // namespace exportkit
