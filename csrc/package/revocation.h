// Revocation lists: keys whose signatures no longer count, and packages that are not opened (FORMAT.md, "Revocation").
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "package/keys.h"

namespace exportkit {

// The content of a list. Both maps have the reasons; a reason may be empty.
struct RevocationList {
  std::filesystem::path path;
  int64_t sequence = 0;                         // rises by one with each change of the list
  std::map<std::string, std::string> keys;      // by key id
  std::map<std::string, std::string> packages;  // by the manifest's sha256
};

// Parses a list: JsonError.
RevocationList parse_revocations(std::string_view content, const std::filesystem::path& path);

// Reads a list that only we or root can change. std::system_error if it cannot be read, std::invalid_argument if it is
// refused, JsonError if it is malformed.
RevocationList read_revocations(const std::filesystem::path& path);

// Reads a list that anybody may change and returns its text; empty if there is no file. UsageError.
std::string revocations_text(const std::filesystem::path& path);

// All lists that apply on this machine. What one of them revokes is revoked.
class Revocations {
 public:
  std::vector<RevocationList> lists;

  // Refuses a package by its manifest's digest: RevokedError. `name` is the file's name, for messages.
  void check_package(const std::string& manifest_sha256, const std::string& name) const;
  // Which list revokes a key and why, such as "revoked by /etc/exportkit/revoked.json (stolen)"; empty if none does.
  std::string of_key(const std::string& id) const;
  bool any_key() const;
};

}  // namespace exportkit
