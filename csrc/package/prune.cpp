// Lists and prunes the cache while models may be running. exportkit/runtime/cache has the layout.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "package/atomic.h"
#include "package/c_api.h"
#include "package/cache.h"
#include "package/text.h"
#include "package/trust_records.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTemporaryPrefix = "exportkit-";  // of exportkit's folders in the temporary directory

// Something in the cache, or a leftover.
struct CacheItem {
  // "library" or "target" (unpacked), "compiled" (by an export), "package" (its record), or "leftover" of a killed
  // process
  std::string kind;
  fs::path place;  // below a folder that is kept open, so that nobody can replace the folder
  fs::path path;
  int64_t size;  // in bytes
  double used;   // the time of the last use, in seconds since 1970
  bool in_use;   // whether a process uses or writes it now
  bool removed = false;
};

bool is_entry(std::string_view name) { return is_hex(name); }

// Whether the name is `<device>-<inode>.json`, or the temporary name of such a file.
bool is_package_record(std::string_view name) {
  if (is_temporary(name) && name.starts_with('.')) name = temporary_prefix(name).substr(1);
  constexpr std::string_view kEnding = ".json";
  if (!name.ends_with(kEnding)) return false;
  name.remove_suffix(kEnding.size());
  const auto is_number = [](std::string_view text) { return !text.empty() && std::ranges::all_of(text, is_digit); };
  const size_t dash = name.find('-');
  return dash != std::string_view::npos && is_number(name.substr(0, dash)) && is_number(name.substr(dash + 1));
}

bool is_leftover_folder(std::string_view name) { return name.starts_with(kTemporaryPrefix) && is_temporary(name); }

// Visits every file below a path, or the path if it is a file. Does not follow links.
void for_each_file(const fs::path& path, const std::function<void(const fs::path&, const struct stat&)>& visit) {
  struct stat status{};
  if (lstat(path.c_str(), &status) != 0) return;  // gone meanwhile
  if (!S_ISDIR(status.st_mode)) return visit(path, status);
  for (const std::string& name : names_in(path)) for_each_file(path / name, visit);
}

// The names in a folder that satisfy `is_name`, have this file type (not links) and belong to this user.
std::vector<std::string> ours_in(const fs::path& folder, mode_t kind, bool (*is_name)(std::string_view)) {
  std::vector<std::string> names = names_in(folder);
  std::erase_if(names, [&](const std::string& name) {
    struct stat status{};
    const bool there = is_name(name) && lstat((folder / name).c_str(), &status) == 0;
    return !there || (status.st_mode & S_IFMT) != kind || status.st_uid != geteuid();
  });
  return names;
}

// Opens a file and locks it exclusively; nothing if another process has a lock, or it cannot be opened.
Descriptor locked(const fs::path& path) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  // On a file system without locks the item counts as free: a running model keeps its files mapped.
  if (file && flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return Descriptor();
  return file;
}

bool in_use(const fs::path& path) { return !locked(path); }

class Survey {
 public:
  explicit Survey(const fs::path& temporary) {
    for (const std::string& name : ours_in(temporary, S_IFDIR, is_leftover_folder)) {
      add("leftover", temporary / name, temporary / name, in_use(temporary / name));
    }
    add_entries("libraries", "library");
    add_entries("targets", "target");
    add_entries(kCompiled, "compiled");
    add_packages();
    std::ranges::stable_sort(found, {}, &CacheItem::used);
  }

  std::vector<CacheItem> found;

 private:
  // A path to a folder of the cache that stays valid while this object lives; empty if there is no folder.
  fs::path open_folder(const char* name) {
    try {
      const Descriptor& folder = folders_.emplace_back(open_private_folder(cache_directory(), name));
      return folder ? fs::path("/proc/self/fd") / std::to_string(folder.get()) : fs::path();
    } catch (const std::system_error& error) {
      throw Error(
          errors::kCache, "the cache " + cache_directory().string() + " cannot be used: " + reason_of(error),
          "Set EXPORTKIT_CACHE to a directory that other users cannot change; this includes the folders above.");
    }
  }

  void add_entries(const char* name, const char* kind) {
    const fs::path folder = open_folder(name), shown = cache_directory() / name;
    if (folder.empty()) return;
    for (const std::string& entry : ours_in(folder, S_IFDIR, is_entry)) {
      const fs::path place = folder / entry;
      const bool used = in_use(place);
      std::vector<std::string> unfinished = names_in(place);
      std::erase_if(unfinished, [](const std::string& file) { return !is_temporary(file); });
      if (used || access((place / kEntryRecord).c_str(), F_OK) == 0) {
        for (const std::string& file : unfinished) {
          add("leftover", place / file, shown / entry / file, in_use(place / file));
        }
        add(kind, place, shown / entry, used);
      } else {  // no record: a loader could not write it, or was killed
        bool empty = true;
        for_each_file(place,
                      [&](const fs::path& file, const struct stat&) { empty &= file.filename() == kWritersLock; });
        add(!unfinished.empty() || empty ? "leftover" : kind, place, shown / entry, false);
      }
    }
  }

  void add_packages() {
    const fs::path folder = open_folder("packages"), shown = cache_directory() / "packages";
    if (folder.empty()) return;
    for (const std::string& name : ours_in(folder, S_IFREG, is_package_record)) {
      add(is_temporary(name) ? "leftover" : "package", folder / name, shown / name, in_use(folder / name));
    }
  }

  void add(const char* kind, const fs::path& place, const fs::path& shown, bool used) {
    struct stat status{};
    if (lstat(place.c_str(), &status) != 0) return;  // gone meanwhile
    const double when = static_cast<double>(FileState::of(status).mtime_ns) / 1e9;
    int64_t size = 0;
    for_each_file(place, [&](const fs::path&, const struct stat& file) { size += file.st_size; });
    found.push_back({kind, place, shown, size, when, used});
  }

  std::vector<Descriptor> folders_;
};

// Removes an item that nobody else has locked; whether it is gone.
bool removed(const fs::path& place) {
  const Descriptor lock = locked(place);
  if (!lock) return false;
  // The record goes first: if this process is killed now, a partial entry must not count as verified.
  unlink((place / kEntryRecord).c_str());
  remove_tree(place);
  return access(place.c_str(), F_OK) != 0;
}

// Lists the cache, and leftovers in a directory for temporary files, least recently used first. With limits, removes
// the items that exceed them, but none in use. Of a limit of bytes, records of packages stay: they are small, and
// without its record a large package is hashed again. With a kind, only items of that kind count and are removed.
// Creates nothing, follows no links, and ignores names that the cache does not use. CacheError: another user can change
// the cache; nothing was removed.
std::vector<CacheItem> cache_items(const fs::path& temporary, const ek_prune_limits* limits,
                                   std::string_view kind = {}) {
  Survey survey(temporary);
  std::erase_if(survey.found, [&](const CacheItem& item) { return !kind.empty() && item.kind != kind; });
  int64_t total = 0;
  for (const CacheItem& item : survey.found) total += item.size;
  const double now = static_cast<double>(now_ns()) / 1e9;
  for (CacheItem& item : survey.found) {
    const bool wanted = limits && (limits->everything || item.kind == "leftover" ||
                                   (limits->unused_for && now - item.used > *limits->unused_for) ||
                                   (limits->max_bytes && total > *limits->max_bytes && item.kind != "package"));
    item.removed = wanted && !item.in_use && removed(item.place);
    if (item.removed) total -= item.size;
  }
  return std::move(survey.found);
}

}  // namespace
}  // namespace exportkit

using namespace exportkit;
using namespace exportkit::c_api;

extern "C" {

int ek_limit_compiled(int64_t max_bytes) {
  return guarded([&] {
    const ek_prune_limits limits{&max_bytes, nullptr, 0};
    cache_items(cache_directory(), &limits, kCompiled);
  });
}

int ek_cache_items(const char* temporary, const ek_prune_limits* limits, ek_text* items) {
  return guarded([&] {
    answer(items, json_list(cache_items(temporary, limits), [](const CacheItem& item) {
             return json_object({{"kind", json_text(item.kind)},
                                 {"path", json_text(item.path.string())},
                                 {"size", std::to_string(item.size)},
                                 {"used", std::to_string(item.used)},
                                 {"in_use", json_bool(item.in_use)},
                                 {"removed", json_bool(item.removed)}});
           }));
  });
}
}
