#include "package/guarded.h"

#include <grp.h>
#include <pwd.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <string_view>

#include "package/atomic.h"

namespace exportkit {
namespace {

// Whether a group is this user's private group. Many distributions make one for each user and let it write the user's
// files.
bool is_own_group(gid_t id) {
  std::array<char, 4096> user_text{}, group_text{};
  passwd user{}, *found_user = nullptr;
  group own{}, *found_group = nullptr;
  getpwuid_r(geteuid(), &user, user_text.data(), user_text.size(), &found_user);
  getgrgid_r(id, &own, group_text.data(), group_text.size(), &found_group);  // a group with many members does not fit
  if (found_user == nullptr || found_group == nullptr) return false;
  const std::string_view name = user.pw_name;
  if (user.pw_gid != id || name != own.gr_name) return false;
  for (char** member = own.gr_mem; *member != nullptr; ++member) {
    if (name != *member) return false;
  }
  return true;
}

// Whether this user namespace does not map a user id. Sandboxes and clusters make namespaces without root: root's
// folders then show the id 65534, and so do the folders of every other user of the machine. Nobody can tell them apart
// in there, so all of them count as root's.
bool is_unmapped(uid_t id) {
  std::ifstream map("/proc/self/uid_map");
  bool any = false;
  for (uint64_t inside = 0, outside = 0, count = 0; map >> inside >> outside >> count; any = true) {
    if (id >= inside && id - inside < count) return false;
  }
  return any;
}

const char* others_may_rename_in(const struct stat& folder) {
  // Root's folders are trusted too: a container's image may bring a cache.
  const bool ours = folder.st_uid == 0 || folder.st_uid == geteuid();
  if (!ours && !is_unmapped(folder.st_uid)) return "belongs to another user";
  if ((folder.st_mode & S_ISVTX) != 0) return nullptr;  // like /tmp: users rename only their own files
  if ((folder.st_mode & S_IWOTH) != 0) return "may be written to by other users";
  if ((folder.st_mode & S_IWGRP) != 0 && !is_own_group(folder.st_gid)) return "may be written to by its group";
  return nullptr;
}

}  // namespace

const char* others_may_change(const struct stat& status) {
  if (S_ISLNK(status.st_mode)) return "is a link";
  if (status.st_uid != 0 && status.st_uid != geteuid()) return "belongs to another user";
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) return "may be written to by other users";
  return nullptr;
}

// Checks every folder from the root on: if nobody else can rename the next one, none can be replaced during the check.
std::string others_may_replace(const std::filesystem::path& path) {
  for (auto folder = path.parent_path();; folder = folder.parent_path()) {
    struct stat status{};
    if (lstat(folder.c_str(), &status) != 0) throw FileError(folder);
    const char* reason = S_ISLNK(status.st_mode) ? "is a link" : others_may_rename_in(status);
    if (reason != nullptr) return "is in " + folder.string() + ", which " + reason;
    if (folder == folder.parent_path()) return {};
  }
}

}  // namespace exportkit
