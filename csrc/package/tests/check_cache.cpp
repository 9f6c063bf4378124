// Uses the cache with a clock that the tests set.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdlib>

#include "package/cache.h"
#include "package/reader.h"
#include "package/tests/commands.h"
#include "package/trust_records.h"

using namespace exportkit;

namespace {

bool stopped = false;
int64_t clock_ns = 0;  // the clock's time if it is stopped, else how far it is ahead

bool always(const std::string& word) { return word == "always"; }

// environment NAME VALUE
std::string environment(const Words& words) {
  setenv(words.at(1).c_str(), words.at(2).c_str(), 1);
  return answer("null");
}

// clock ahead|stopped NANOSECONDS: from now on
std::string clock(const Words& words) {
  stopped = words.at(1) == "stopped";
  clock_ns = std::stoll(words.at(2));
  return answer("null");
}

// verify PATH once|always: whether the package was read
std::string verify(const Words& words) {
  return answer(verify_once(PackageReader(OpenedFile::by_path(words.at(1))), always(words.at(2))) ? "true" : "false");
}

// unpack PATH library|target INDEX once|always: the folder and the warnings
std::string unpack(const Words& words) {
  const PackageReader reader(OpenedFile::by_path(words.at(1)));
  const size_t index = std::stoul(words.at(3));
  std::string warned;
  const Unpacking how{always(words.at(4)),
                      [&](const std::string& text) { warned += (warned.empty() ? "" : ", ") + json_text(text); }};
  const CacheEntry entry = words.at(2) == "library"
                               ? unpack(reader, reader.manifest().libraries.at(index), how)
                               : unpack_code(reader, reader.manifest().targets.at(index).name, how);
  return answer("[" + json_text(entry.folder.string()) + ", [" + warned + "]]");
}

}  // namespace

// Replaces libc's function, which the runtime calls. File times still come from the kernel.
extern "C" int clock_gettime(clockid_t id, timespec* time) noexcept {
  const auto status = static_cast<int>(syscall(SYS_clock_gettime, id, time));
  if (id != CLOCK_REALTIME) return status;
  const int64_t now = clock_ns + (stopped ? 0 : time->tv_sec * 1'000'000'000 + time->tv_nsec);
  *time = {now / 1'000'000'000, now % 1'000'000'000};
  return status;
}

int main(int argc, char** argv) {
  return run_all({{"environment", environment}, {"clock", clock}, {"verify", verify}, {"unpack", unpack}}, argc, argv);
}
