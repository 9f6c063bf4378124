#include "package/revocation.h"

#include <algorithm>
#include <stdexcept>

#include "package/errors.h"
#include "package/json_fields.h"
#include "package/small_files.h"
#include "package/text.h"

namespace exportkit {
namespace {

constexpr int kMaxDepth = 4;                   // of brackets
constexpr size_t kMaxBytes = size_t{4} << 20;  // some 20,000 entries
constexpr size_t kMaxReasonBytes = 200;

std::string short_reason(JsonReader& json) {
  std::string reason = json.string();
  if (reason.size() > kMaxReasonBytes) json.fail("expected at most 200 bytes");
  return reason;
}

int64_t positive(JsonReader& json) {
  const int64_t value = json.integer();
  if (value < 1) json.fail("expected at least 1");
  return value;
}

// A list of {"<digest>": ..., "reason": ...}. A digest that is there twice is an error of whoever wrote the list.
auto reasons_by(const char* key) {
  return [=](JsonReader& json) {
    std::map<std::string, std::string> reasons;
    json.array([&] {
      std::string digest, reason;
      fields(json, field(key, digest, sha256), field("reason", reason, short_reason));
      if (!reasons.emplace(digest, reason).second) json.fail("the same digest is there twice");
    });
    return reasons;
  };
}

std::string by(const RevocationList& list, const std::string& reason) {
  return "revoked by " + list.path.string() + (reason.empty() ? "" : " (" + printable(reason) + ")");
}

}  // namespace

RevocationList parse_revocations(std::string_view content, const std::filesystem::path& path) {
  JsonReader json = JsonReader::checked(content, kMaxDepth);
  RevocationList list{path, 0, {}, {}};
  int64_t version = 0;
  fields(json, field("version", version, version_1), field("sequence", list.sequence, positive),
         field("keys", list.keys, reasons_by("key_id")),
         field("packages", list.packages, reasons_by("manifest_sha256")));
  return list;
}

RevocationList read_revocations(const std::filesystem::path& path) {
  const auto content = read_limited(path, /*guarded=*/true, kMaxBytes);
  if (!content) throw std::invalid_argument("does not exist");
  return parse_revocations(*content, path);
}

std::string revocations_text(const std::filesystem::path& path) {
  try {
    const std::string content = read_limited(path, /*guarded=*/false, kMaxBytes).value_or("");
    if (!content.empty()) parse_revocations(content, path);
    return content;
  } catch (const std::exception&) {
    throw Error(errors::kUsage, "the revocation list " + path.string() + " " + file_problem());
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
