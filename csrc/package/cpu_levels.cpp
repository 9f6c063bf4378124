#include "package/cpu_levels.h"

#include <algorithm>
#include <set>
#include <vector>

#if defined(__x86_64__)
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif
#include <sys/utsname.h>

namespace exportkit {
namespace {

struct Level {
  const char* name;
  std::vector<std::string> flags;  // that the level adds, named as in /proc/cpuinfo
};

// The names are what compilers take as -march.
const std::vector<Level>& levels_of(std::string_view machine) {
  // The x86-64 psABI's micro-architecture levels. `abm` is lzcnt, `pni` is SSE3.
  static const std::vector<Level> x86_64 = {
      {"x86-64", {}},
      {"x86-64-v2", {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}},
      {"x86-64-v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}},
      {"x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}}};
  // Arm defines no such levels. Every CPU has the first one, with NEON. Neoverse N1 (Graviton 2, Altra) has the second.
  // Neoverse V1, V2 and N2 (Graviton 3 and 4, Grace) have the third, whose vectors differ in length.
  static const std::vector<Level> aarch64 = {
      {"armv8-a", {"fp", "asimd"}},
      {"armv8.2-a+dotprod", {"atomics", "crc32", "asimdrdm", "dcpop", "asimddp"}},
      {"armv8.2-a+dotprod+sve+bf16", {"fphp", "asimdhp", "sve", "bf16", "svebf16"}}};
  static const std::vector<Level> none;
  return machine == "x86_64" ? x86_64 : machine == "aarch64" ? aarch64 : none;
}

std::string machine() {
  utsname name{};
  uname(&name);
  return name.machine;
}

#if defined(__x86_64__)

// The flags that the kernel lists and the CPU reports. The kernel's list has what the kernel allows, but under an
// emulator it describes the real CPU. So both are asked.
std::set<std::string> cpu_flags() {
  static const std::map<std::string, bool> reported = {
      {"avx", __builtin_cpu_supports("avx")},           {"avx2", __builtin_cpu_supports("avx2")},
      {"bmi1", __builtin_cpu_supports("bmi")},          {"bmi2", __builtin_cpu_supports("bmi2")},
      {"fma", __builtin_cpu_supports("fma")},           {"avx512f", __builtin_cpu_supports("avx512f")},
      {"avx512bw", __builtin_cpu_supports("avx512bw")}, {"avx512cd", __builtin_cpu_supports("avx512cd")},
      {"avx512dq", __builtin_cpu_supports("avx512dq")}, {"avx512vl", __builtin_cpu_supports("avx512vl")}};
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && !line.starts_with("flags")) line.clear();
  std::istringstream words(line.substr(line.find(':') + 1));
  std::set<std::string> flags{std::istream_iterator<std::string>(words), {}};
  for (const auto& [flag, has] : reported) {
    if (!has) flags.erase(flag);
  }
  return flags;
}

#elif defined(__aarch64__)

// The kernel reports a bit for each feature that it and the CPU support. An emulator reports what it emulates.
std::set<std::string> cpu_flags() {
  struct Flag {
    const char* name;
    unsigned long where, bit;
  };
  static constexpr Flag kFlags[] = {{"fp", AT_HWCAP, HWCAP_FP},
                                    {"asimd", AT_HWCAP, HWCAP_ASIMD},
                                    {"atomics", AT_HWCAP, HWCAP_ATOMICS},
                                    {"crc32", AT_HWCAP, HWCAP_CRC32},
                                    {"asimdrdm", AT_HWCAP, HWCAP_ASIMDRDM},
                                    {"dcpop", AT_HWCAP, HWCAP_DCPOP},
                                    {"asimddp", AT_HWCAP, HWCAP_ASIMDDP},
                                    {"fphp", AT_HWCAP, HWCAP_FPHP},
                                    {"asimdhp", AT_HWCAP, HWCAP_ASIMDHP},
                                    {"sve", AT_HWCAP, HWCAP_SVE},
                                    {"bf16", AT_HWCAP2, HWCAP2_BF16},
                                    {"svebf16", AT_HWCAP2, HWCAP2_SVEBF16}};
  std::set<std::string> flags;
  for (const Flag& flag : kFlags) {
    if (getauxval(flag.where) & flag.bit) flags.insert(flag.name);
  }
  return flags;
}

#else

std::set<std::string> cpu_flags() { return {}; }

#endif

}  // namespace

int cpu_level_rank(std::string_view platform, std::string_view level) {
  const auto& levels = levels_of(platform.substr(platform.find('-') + 1));
  const auto found = std::find_if(levels.begin(), levels.end(), [&](const Level& one) { return one.name == level; });
  return found == levels.end() ? -1 : static_cast<int>(found - levels.begin());
}

std::string host_cpu_isa() {
  const std::string here = machine();
  const std::set<std::string> flags = cpu_flags();
  std::string found;
  for (const Level& next : levels_of(here)) {
    const auto has = [&](const std::string& flag) { return flags.contains(flag); };
    if (!std::all_of(next.flags.begin(), next.flags.end(), has)) break;
    found = next.name;
  }
  return levels_of(here).empty() ? here : found;
}

}  // namespace exportkit
