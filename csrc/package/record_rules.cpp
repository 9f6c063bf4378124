#include "package/record_rules.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>

#include "package/digests.h"
#include "package/errors.h"
#include "package/text.h"

namespace exportkit {
namespace {

constexpr size_t kMaxNameLength = 512;

bool is_part(std::string_view part) {
  const auto allowed = [](char c) {
    return is_alnum(c) || std::string_view("_.+=@-").find(c) != std::string_view::npos;
  };
  return std::all_of(part.begin(), part.end(), allowed) && part.find_first_not_of('.') != std::string_view::npos;
}

bool is_safe(std::string_view name) {
  if (name.size() > kMaxNameLength) return false;
  for (;;) {
    const size_t slash = name.find('/');
    if (!is_part(name.substr(0, slash))) return false;
    if (slash == std::string_view::npos) return true;
    name.remove_prefix(slash + 1);
  }
}

std::string some(const std::vector<std::string_view>& names) {
  constexpr size_t kShown = 5;
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) out += (i ? ", " : "") + shown(names[i]);
  return out + (names.size() > kShown ? " and " + std::to_string(names.size() - kShown) + " more" : "");
}

}  // namespace

void check_record_names(const std::vector<std::string_view>& names) {
  std::unordered_set<std::string_view> seen;
  for (const std::string_view name : names) {
    if (!is_safe(name)) {
      throw Error(errors::kUnsafeRecordName, concat("record name ", Quoted{name},
                                                    " is not allowed: names are relative paths; each part has letters, "
                                                    "digits and _.+=@-, and not only dots"));
    }
    if (!seen.insert(name).second) {
      throw Error(errors::kDuplicateRecord, "two records have the name " + std::string(name));
    }
  }
  std::vector<std::string_view> sorted(seen.begin(), seen.end());
  std::sort(sorted.begin(), sorted.end());
  std::string inside;
  for (const std::string_view folder : sorted) {
    inside.assign(folder).append("/");
    const auto name = std::lower_bound(sorted.begin(), sorted.end(), std::string_view(inside));
    if (name != sorted.end() && name->starts_with(inside)) {
      throw Error(errors::kUnsafeRecordName, concat(folder, " is both a record and a folder of the record ", *name));
    }
  }
  for (const std::string_view name : names) {
    if (!name.starts_with(kRoot)) {
      throw Error(errors::kArchiveLayout, "record " + std::string(name) + " is not under " + std::string(kRoot) +
                                              ", the root folder of every package");
    }
  }
}

void check_record_order(const std::vector<Entry>& entries) {
  const auto out_of_place = [](const Entry& one, const Entry& next) { return one.name > next.name; };
  const bool first = entries[0].name == kManifestName;
  const auto found = std::adjacent_find(entries.begin() + 1, entries.end(), out_of_place);
  if (first && found == entries.end()) return;
  throw Error(errors::kArchiveLayout,
              "record " + (first ? std::next(found)->name : entries[0].name) +
                  " is out of place: the manifest comes first, then the records sorted by name");
}

void check_listed(const std::vector<Record>& records, std::span<const Entry> entries) {
  std::vector<std::string_view> listed, present, missing, unlisted;
  for (const Record& record : records) listed.push_back(record.name);
  for (const Entry& entry : entries) present.push_back(entry.name);
  std::set_difference(listed.begin(), listed.end(), present.begin(), present.end(), std::back_inserter(missing));
  std::set_difference(present.begin(), present.end(), listed.begin(), listed.end(), std::back_inserter(unlisted));
  if (!missing.empty()) {
    throw Error(errors::kMissingRecord, "the manifest lists records that the archive does not have: " + some(missing));
  }
  if (!unlisted.empty()) {
    throw Error(errors::kUnlistedRecord, "the archive has records that the manifest does not list: " + some(unlisted));
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    const Record& record = records[i];
    if (entries[i].size != static_cast<uint64_t>(record.size)) {
      throw Error(errors::kDigestMismatch, "record " + record.name + " has " + std::to_string(entries[i].size) +
                                               " bytes; the manifest says " + std::to_string(record.size));
    }
  }
  for (const StockRecord& stock : kStockRecords) {
    const auto found = std::lower_bound(listed.begin(), listed.end(), stock.name);
    const auto says_so = [&](const Record& record) {
      return record.name == stock.name && static_cast<size_t>(record.size) == stock.content.size() &&
             record.sha256 == sha256_hex(stock.content);
    };
    if (found == listed.end() || !says_so(records[static_cast<size_t>(found - listed.begin())])) {
      throw Error(errors::kStockRecord, "record " + std::string(stock.name) + " must exist and contain `" +
                                            std::string(stock.text) + "`: torch looks for it first");
    }
  }
}

}  // namespace exportkit
