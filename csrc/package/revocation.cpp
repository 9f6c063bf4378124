#include "package/revocation.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "package/errors.h"
#include "package/json.h"
#include "package/small_files.h"
#include "package/text.h"

namespace exportkit {
namespace {

constexpr int kMaxDepth = 4;                   // of brackets
constexpr size_t kMaxBytes = size_t{4} << 20;  // some 20,000 entries
constexpr size_t kMaxReasonBytes = 200;

// Reads a list of {"<digest>": ..., "reason": ...}. A digest that is there twice is an error of whoever wrote the list.
void read_entries(JsonReader& json, std::string_view digest_key, std::map<std::string, std::string>& entries) {
  json.array([&] {
    std::string digest, reason;
    size_t seen = 0;
    json.object([&](std::string_view key) {
      ++seen;
      if (key == digest_key) {
        digest = json.sha256();
      } else if (key == "reason") {
        reason = json.string();
        if (reason.size() > kMaxReasonBytes) json.fail("expected at most 200 bytes");
      } else {
        json.fail("unknown key");
      }
    });
    if (seen != 2) json.fail("object lacks a required key");
    if (!entries.emplace(digest, reason).second) json.fail("the same digest is there twice");
  });
}

std::string by(const RevocationList& list, const std::string& reason) {
  return "revoked by " + list.path.string() + (reason.empty() ? "" : " (" + printable(reason) + ")");
}

}  // namespace

RevocationList parse_revocations(std::string_view content, const std::filesystem::path& path) {
  JsonReader json(content, kMaxDepth);
  JsonReader whole = json;
  whole.skip();
  whole.end();
  if (!whole.oddity().empty()) throw JsonError("it contains " + whole.oddity());
  RevocationList list{path, 0, {}, {}};
  size_t seen = 0;
  json.object([&](std::string_view key) {
    ++seen;
    if (key == "version") {
      if (json.integer() != 1) json.fail("expected version 1");
    } else if (key == "sequence") {
      list.sequence = json.integer();
      if (list.sequence < 1) json.fail("expected at least 1");
    } else if (key == "keys") {
      read_entries(json, "key_id", list.keys);
    } else if (key == "packages") {
      read_entries(json, "manifest_sha256", list.packages);
    } else {
      json.fail("unknown key");
    }
  });
  if (seen != 4) json.fail("object lacks a required key");
  return list;
}

RevocationList read_revocations(const std::filesystem::path& path) {
  const auto content = read_limited(path, /*guarded=*/true, kMaxBytes);
  if (!content) throw std::invalid_argument("does not exist");
  return parse_revocations(*content, path);
}

std::string revocations_text(const std::filesystem::path& path) {
  const std::string name = "the revocation list " + path.string();
  try {
    const std::string content = read_limited(path, /*guarded=*/false, kMaxBytes).value_or("");
    if (!content.empty()) parse_revocations(content, path);
    return content;
  } catch (const std::system_error& error) {
    throw Error(errors::kUsage, name + " cannot be read: " + error.code().message());
  } catch (const JsonError& error) {
    throw Error(errors::kUsage, name + " does not follow FORMAT.md: " + error.what());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kUsage, name + " " + error.what());
  }
}

void Revocations::check_package(const std::string& manifest_sha256, const std::string& name) const {
  for (const RevocationList& list : lists) {
    const auto found = list.packages.find(manifest_sha256);
    if (found == list.packages.end()) continue;
    throw Error(errors::kRevoked,
                name + " is " + by(list, found->second) + ": its manifest has sha256 " + manifest_sha256,
                "Get another release of it. No signature makes a revoked package valid again.");
  }
}

std::string Revocations::of_key(const std::string& id) const {
  for (const RevocationList& list : lists) {
    if (const auto found = list.keys.find(id); found != list.keys.end()) return by(list, found->second);
  }
  return "";
}

bool Revocations::any_key() const {
  return std::any_of(lists.begin(), lists.end(), [](const RevocationList& list) { return !list.keys.empty(); });
}

}  // namespace exportkit
