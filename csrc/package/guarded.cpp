#include "package/guarded.h"

#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include "package/atomic.h"
#include "package/container.h"
#include "package/errors.h"
#include "package/json.h"

namespace exportkit {

namespace {

namespace fs = std::filesystem;

constexpr int kMaxLinks = 40;  // as in Linux

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

// Root's files and folders are trusted too: a container's image may bring a cache.
bool is_trusted(uid_t owner) { return owner == 0 || owner == geteuid() || is_unmapped(owner); }

const char* others_may_rename_in(const struct stat& folder) {
  if (!is_trusted(folder.st_uid)) return "belongs to another user";
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

// Goes from the root on: if nobody else can rename the next folder, none can be replaced during the check.
Followed follow(const fs::path& path) {
  fs::path done;
  std::vector<fs::path> steps;  // the next one is the last
  const auto go = [&](const fs::path& way) {
    const std::vector<fs::path> parts(way.begin(), way.end());
    steps.insert(steps.end(), parts.rbegin(), parts.rend());
  };
  go(fs::absolute(path));
  for (int links = 0; !steps.empty();) {
    const fs::path step = steps.back();
    steps.pop_back();
    if (step == "..") {
      done = done.parent_path();
    } else if (step.is_absolute()) {
      done = step;
    }
    if (step == ".." || step == "." || step.empty() || step.is_absolute()) continue;
    struct stat folder{}, status{};
    const fs::path next = done / step;
    const bool made = lstat(done.c_str(), &folder) == 0;
    if (!made && errno != ENOENT) throw FileError(done);
    const char* reason = made ? others_may_rename_in(folder) : nullptr;
    if (reason != nullptr) return {done, "is in " + done.string() + ", which " + reason};
    if (lstat(next.c_str(), &status) != 0 && errno != ENOENT) throw FileError(next);
    if (!S_ISLNK(status.st_mode)) {
      done = next;
      continue;
    }
    if (!is_trusted(status.st_uid)) return {next, "is behind the link " + next.string() + " of another user"};
    if (++links > kMaxLinks) throw FileError(next, ELOOP);
    go(fs::read_symlink(next));
  }
  return {done, {}};
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::filesystem::path user_folder(const char* variable, const char* in_home) {
  // The specification says to ignore relative paths.
  if (const std::filesystem::path base = environment(variable); base.is_absolute()) return base / "exportkit";
  std::string home = environment("HOME");
  if (home.empty()) {
    std::array<char, 4096> text{};
    passwd user{}, *found = nullptr;
    getpwuid_r(getuid(), &user, text.data(), text.size(), &found);
    home = found == nullptr ? "~" : found->pw_dir;
  }
  return std::filesystem::path(home) / in_home / "exportkit";
}

std::optional<std::string> read_limited(const std::filesystem::path& path, bool guarded, size_t most) {
  // Non-blocking, or a FIFO would wait for a writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  struct stat status{};
  if (!file || fstat(file.get(), &status) != 0) throw FileError(path);
  if (!S_ISREG(status.st_mode)) throw std::invalid_argument("is not a plain file");
  if (guarded) {
    if (const char* reason = others_may_change(status)) throw std::invalid_argument(reason);
    if (const std::string reason = follow(path).reason; !reason.empty()) throw std::invalid_argument(reason);
  }
  std::string content = read_at(file.get(), 0, most + 1);
  if (content.size() > most) throw std::invalid_argument("has more than " + std::to_string(most) + " bytes");
  return content;
}

std::string file_problem() {
  try {
    throw;
  } catch (const std::system_error& error) {
    return "cannot be read: " + error.code().message();
  } catch (const JsonError& error) {
    return std::string("does not follow FORMAT.md: ") + error.what();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

std::optional<std::string> read_signature_file(const std::filesystem::path& file) {
  try {
    return read_limited(file);
  } catch (const std::system_error& error) {
    throw Error(errors::kUsage, "cannot read the signature file " + file.string() + ": " + error.code().message());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kSignature, "the signature file " + file.filename().string() + " " + error.what());
  }
}

}  // namespace exportkit
