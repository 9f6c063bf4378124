

#if defined(__aarch64__)
#endif

#include "package/targets.h"

#include <dlfcn.h>
#include <sys/auxv.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "package/consistency.h"
#include "package/errors.h"
#include "package/text.h"

namespace exportkit {

namespace {

using Version = std::pair<int, int>;

std::string file_name(const Library& library) { return library.record.substr(library.record.rfind('/') + 1); }

// Takes a number of at most so many digits off the text.
std::optional<int> leading_number(std::string_view& text, size_t most) {
  const auto end = static_cast<size_t>(std::ranges::find_if_not(text, is_digit) - text.begin());
  if (end == 0 || end > most) return std::nullopt;
  int number = 0;
  for (const char digit : text.substr(0, end)) number = 10 * number + (digit - '0');
  text.remove_prefix(end);
  return number;
}

// (major, minor) of a version such as "2.13.0+cpu": ManifestConsistencyError.
Version minor_version(const std::string& version) {
  std::string_view rest = version;
  const auto major = leading_number(rest, 6);
  const bool dot = rest.starts_with('.');
  rest.remove_prefix(dot ? 1 : 0);
  const auto minor = dot ? leading_number(rest, 6) : std::nullopt;
  if (major && minor) return {*major, *minor};
  throw Error(errors::kManifestConsistency,
              "invalid version " + shown(version) + ": it must start with <major>.<minor>");
}

struct CudaArchitecture {
  Version version;
  char suffix;  // 'a': it uses features that no other architecture has; 'f': that its generation has; 0
};

std::optional<CudaArchitecture> parse_architecture(const std::string& name) {
  std::string_view rest = name;
  if (!rest.starts_with("sm_")) return std::nullopt;
  rest.remove_prefix(3);
  const char suffix = rest.ends_with('a') || rest.ends_with('f') ? rest.back() : '\0';
  if (suffix != '\0') rest.remove_suffix(1);
  const auto number = leading_number(rest, 6);  // the last digit is the minor version
  if (!number || *number < 10 || !rest.empty()) return std::nullopt;
  return CudaArchitecture{{*number / 10, *number % 10}, suffix};
}

struct Level {
  std::string_view name;
  std::vector<std::string> flags;  // that the level adds, named as in /proc/cpuinfo
};

// The machine of a platform such as "linux-aarch64".
std::string_view machine_of(std::string_view platform) { return platform.substr(platform.find('-') + 1); }

// The names are what compilers take as -march.
const std::vector<Level>& levels_of(std::string_view platform) {
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
  const std::string_view machine = machine_of(platform);
  return machine == "x86_64" ? x86_64 : machine == "aarch64" ? aarch64 : none;
}

// A level's rank on a platform; -1 if the platform does not have it. A CPU runs code of its own level and of lower
// ranks.
int cpu_level_rank(std::string_view platform, std::string_view level) {
  const auto& levels = levels_of(platform);
  const auto found = std::ranges::find(levels, level, &Level::name);
  return found == levels.end() ? -1 : static_cast<int>(found - levels.begin());
}

// A CUDA target's host code needs CPU instructions too.
std::optional<std::string> cpu_rejection(const Target& target, const Host& host) {
  if (!target.cpu_isa) return std::nullopt;
  const int needed = cpu_level_rank(target.platform, *target.cpu_isa);
  if (needed < 0) return "its instruction set " + shown(*target.cpu_isa) + " is unknown on " + target.platform;
  if (cpu_level_rank(host.platform, host.cpu_isa) < needed)
    return "it needs a CPU with " + *target.cpu_isa + ", this CPU has " + host.cpu_isa;
  return std::nullopt;
}

// Machine code runs on later minor versions of its architecture.
bool runs_natively(const CudaArchitecture& built, const Version& here) {
  if (built.suffix == 'a') return here == built.version;
  return here.first == built.version.first && here >= built.version;
}

// The driver compiles PTX for any later architecture.
bool runs_by_ptx(const CudaArchitecture& built, const Version& here) {
  return built.suffix ? runs_natively(built, here) : here >= built.version;
}

std::optional<std::string> architecture_rejection(const Target& target, int index, const Host& host) {
  if (!target.cuda_architecture) return std::nullopt;
  const auto built = parse_architecture(*target.cuda_architecture);
  if (!built) return "its CUDA architecture " + shown(*target.cuda_architecture) + " is unknown";
  const Version here = host.capabilities[static_cast<size_t>(index)];
  if (runs_natively(*built, here) || (target.cuda_ptx && runs_by_ptx(*built, here))) return std::nullopt;
  return "it has code for " + *target.cuda_architecture + (target.cuda_ptx ? " and PTX" : "") +
         ", cuda:" + std::to_string(index) + " is sm_" + std::to_string(here.first) + std::to_string(here.second);
}

// A driver runs the code of its own major version of CUDA, whatever the minor one, and of older ones.
std::optional<std::string> driver_rejection(const Host& host) {
  if (!host.driver || minor_version(*host.driver).first >= minor_version(*host.cuda).first) return std::nullopt;
  return "the driver supports CUDA " + *host.driver + ", and this torch has CUDA " + *host.cuda +
         ": install a newer driver, or a torch for CUDA " + std::to_string(minor_version(*host.driver).first);
}

std::optional<std::string> cuda_rejection(const Target& target, int index, const Host& host) {
  if (!host.cuda) return "it needs CUDA, this torch (" + host.torch + ") is a CPU build";
  if (target.built_with_cuda && minor_version(*target.built_with_cuda).first != minor_version(*host.cuda).first) {
    return "it was built with CUDA " + *target.built_with_cuda + ", this torch has CUDA " + *host.cuda;
  }
  if (auto reason = driver_rejection(host)) return reason;
  if (host.capabilities.empty()) return "it needs a CUDA device, and torch sees none";
  if (static_cast<size_t>(index) >= host.capabilities.size()) {
    return concat("it cannot run on cuda:", index, ", torch sees ", host.capabilities.size(), " CUDA device(s)");
  }
  return architecture_rejection(target, index, host);
}

// Why a target does not run on this host and device; nothing if it does.
std::optional<std::string> rejection(const Target& target, const std::string& kind, int index, const Host& host) {
  if (kind != "auto" && kind != target.device)
    return "it is for " + target.device + ", but device " + kind + " was requested";
  if (target.platform != host.platform) return "it is for " + target.platform + ", this is " + host.platform;
  if (minor_version(host.torch) < minor_version(target.needs_torch)) {
    return "it needs torch " + target.needs_torch + " or newer, this is " + host.torch;
  }
  if (auto reason = cpu_rejection(target, host)) return reason;
  return target.device == "cuda" ? cuda_rejection(target, index, host) : std::nullopt;
}

// Whether the dynamic linker finds a library by its name, in the process or on the machine.
bool host_has(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle != nullptr) dlclose(handle);
  return handle != nullptr;
}

// Why the libraries of a target do not load on this host; nothing if they do. The package's own libraries are loaded
// before those that need them. A name with a slash is a path: it is not opened.
std::optional<std::string> needs_rejection(const std::vector<const Library*>& libraries) {
  std::set<std::string> brought;
  for (const Library* library : libraries) brought.insert(file_name(*library));
  for (const Library* library : libraries) {
    for (const std::string& need : library->needs) {
      const bool version = need.starts_with("GLIBC");
      if (version || brought.contains(need) || (need.find('/') == std::string::npos && host_has(need))) continue;
      return "its operator library " + shown(file_name(*library)) + " needs " + shown(need) +
             ", which this host does not have";
    }
  }
  return std::nullopt;
}

// The sort key of targets that run here; the greatest is best.
auto preference(const Target& target) {
  const auto architecture = parse_architecture(target.cuda_architecture.value_or(""));
  return std::tuple(target.device == "cuda", architecture ? architecture->version : Version{-1, 0},
                    cpu_level_rank(target.platform, target.cpu_isa.value_or("")));
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

// --- fat binaries ----------------------------------------------------------------------------------------------------

constexpr std::string_view kMagic = "\x50\xed\x55\xba";
constexpr uint16_t kVersion = 1, kPtx = 1, kCode = 2;
constexpr size_t kHeader = 16, kEntry = 48;  // bytes; an entry's header may be longer, but only these are read
constexpr uint64_t kSpecific = 0x100000, kFamily = 0x200000;  // flags

template <class T>
T at(std::string_view code, size_t place) {
  T value;
  std::memcpy(&value, code.data() + place, sizeof value);
  return value;
}

// The CUDA that brought a version of PTX. 9.x came with 13.x and 7.x with 11.x; of 8.x, 12.6 brought none.
Version cuda_of(const Version& ptx) {
  const auto [major, minor] = ptx;
  return {major + 4, major == 8 && minor > 5 ? minor + 1 : minor};
}

std::string text(const Version& version) { return concat(version.first, ".", version.second); }

std::string architecture(uint32_t number, uint64_t flags) {
  return "sm_" + std::to_string(number) + (flags & kSpecific ? "a" : flags & kFamily ? "f" : "");
}

// Adds the entries of one fat binary: a header, then entries, each with a header of its own.
void add_entries(std::string_view binary, std::vector<FatEntry>& found) {
  for (size_t place = 0; binary.size() - place >= kEntry;) {
    const uint16_t kind = at<uint16_t>(binary, place);
    const uint32_t header = at<uint32_t>(binary, place + 4);
    const uint64_t size = at<uint64_t>(binary, place + 8);
    if ((kind != kPtx && kind != kCode) || header < kEntry || size > binary.size() - place) break;
    const Version ptx{at<uint16_t>(binary, place + 26), at<uint16_t>(binary, place + 24)};
    found.push_back({architecture(at<uint32_t>(binary, place + 28), at<uint64_t>(binary, place + 40)),
                     kind == kPtx ? ptx : Version{}});
    if (header > binary.size() - place - size) break;
    place += header + size;
  }
}

}  // namespace

std::string fit_of(const Choice& choice, const Host& host) {
  const auto built = parse_architecture(choice.target->cuda_architecture.value_or(""));
  if (!built || choice.device_index < 0) return "native";
  return runs_natively(*built, host.capabilities.at(static_cast<size_t>(choice.device_index))) ? "native" : "ptx";
}

std::string degree(const std::vector<std::string>& machine, const std::vector<std::string>& ptx,
                   const std::string& gpu) {
  const auto here = parse_architecture(gpu);
  const auto any = [&](const std::vector<std::string>& names, const auto& runs) {
    return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      const auto built = parse_architecture(name);
      return here && built && runs(*built, here->version);
    });
  };
  return any(machine, runs_natively) ? "native" : any(ptx, runs_by_ptx) ? "ptx" : "no";
}

std::string host_platform() {
  utsname name{};
  uname(&name);
  std::string system = name.sysname;
  std::transform(system.begin(), system.end(), system.begin(), [](unsigned char c) { return std::tolower(c); });
  return system + "-" + name.machine;
}

std::pair<std::string, std::optional<int>> parse_device(const std::string& device) {
  if (device == "auto" || device == "cpu" || device == "cuda") return {device, std::nullopt};
  std::string_view rest = device;
  rest.remove_prefix(rest.starts_with("cuda:") ? 5 : 0);
  const auto index = rest.size() < device.size() ? leading_number(rest, 3) : std::nullopt;
  if (index && rest.empty()) return {"cuda", index};
  throw Error(errors::kUsage, "unknown device " + shown(device), "Give auto, cpu, cuda or cuda:<index>.");
}

Survey survey(std::span<const Target> targets, const std::vector<Library>& libraries, const std::string& device,
              const Host& host) {
  const auto [kind, given] = parse_device(device);
  const int index = given.value_or(host.current_cuda);
  if (targets.empty()) {
    throw Error(errors::kNoTarget, "the package has no compiled target",
                "It has an exported program, which `exportkit export` compiles, or stands beside an ONNX model, which "
                "`exportkit verify` runs.");
  }
  Survey found;
  std::string reasons;
  for (const Target& target : targets) {
    auto reason = rejection(target, kind, index, host);
    if (!reason) reason = needs_rejection(libraries_for(libraries, target));
    if (reason) {
      reasons += "\n  " + target.name + ": " + *reason;
      found.rejected.emplace_back(&target, *std::move(reason));
    } else {
      found.fitting.push_back({&target, target.device == "cuda" ? index : -1});
    }
  }
  if (found.fitting.empty()) {
    const bool other = kind != "auto" && std::ranges::count(targets, kind, &Target::device) == 0;
    throw Error(errors::kNoTarget, "no target of the package runs here (device " + device + "):" + reasons,
                other ? "Ask for the device auto, or package a target for " + kind + ", too."
                      : "Install what the target needs, as said above, or export for this machine.");
  }
  std::ranges::stable_sort(found.fitting, std::ranges::greater(),
                           [](const Choice& choice) { return preference(*choice.target); });
  return found;
}

Choice pick(const std::vector<Target>& targets, const std::vector<Library>& libraries, const std::string& device,
            const Host& host, const std::string& name) {
  const auto found = std::ranges::find(targets, name, &Target::name);
  if (found == targets.end()) {
    std::vector<std::string> names;
    for (const Target& target : targets) names.push_back(target.name);
    throw Error(errors::kUsage, "the package has no target " + shown(name),
                "It has: " + (names.empty() ? "none" : joined(names)) + ".");
  }
  return survey({found, 1}, libraries, device, host).fitting.front();
}

std::optional<std::string> library_rejection(const Library& library, const std::string& torch) {
  if (library.torch_bound && minor_version(*library.torch_bound) != minor_version(torch)) {
    return "it was built against the C++ API of torch " + *library.torch_bound +
           ", which works with that minor version only; this is torch " + torch;
  }
  if (minor_version(torch) < minor_version(library.needs_torch)) {
    return "it needs torch " + library.needs_torch + " or newer, this is " + torch;
  }
  return std::nullopt;
}

std::string host_cpu_isa() {
  const std::string here = host_platform();
  if (levels_of(here).empty()) return std::string(machine_of(here));
  const std::set<std::string> flags = cpu_flags();
  std::string found;
  for (const Level& next : levels_of(here)) {
    if (!std::ranges::all_of(next.flags, [&](const std::string& flag) { return flags.contains(flag); })) break;
    found = next.name;
  }
  return found;
}

std::vector<FatEntry> fat_entries(std::string_view code) {
  std::vector<FatEntry> found;
  for (size_t start = code.find(kMagic); start != std::string_view::npos; start = code.find(kMagic, start + 1)) {
    if (code.size() - start < kHeader || at<uint16_t>(code, start + 4) != kVersion) continue;
    const uint16_t header = at<uint16_t>(code, start + 6);
    const std::string_view rest = code.substr(std::min(start + header, code.size()));
    add_entries(rest.substr(0, at<uint64_t>(code, start + 8)), found);
  }
  return found;
}

std::optional<Version> newest_ptx(std::string_view code) {
  Version newest;
  for (const FatEntry& entry : fat_entries(code)) newest = std::max(newest, entry.ptx);
  return newest == Version{} ? std::nullopt : std::optional(newest);
}

std::optional<std::string> ptx_rejection(const Version& ptx, const std::string& driver) {
  const Version needed = cuda_of(ptx);
  if (needed <= minor_version(driver)) return std::nullopt;
  return "it has no machine code for this GPU, and its PTX " + text(ptx) + " needs a driver for CUDA " + text(needed) +
         "; this one supports CUDA " + driver;
}

}  // namespace exportkit
