// Which of a package's targets runs here, and why the others do not.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "package/manifest.h"

namespace exportkit {

// The machine that targets are compared with.
struct Host {
  std::string platform;                           // such as "linux-x86_64"
  std::string cpu_isa;                            // the highest level: host_cpu_isa
  std::string torch;                              // such as "2.13.0"
  std::optional<std::string> cuda;                // the version torch was built with; empty for a CPU build
  std::vector<std::pair<int, int>> capabilities;  // of each CUDA device
  int current_cuda = 0;                           // the device that `cuda` and `auto` mean
  std::optional<std::string> driver{};            // the newest CUDA that the driver supports, such as "13.0"
};

// A target and its device: the index of the CUDA device, or -1 for the CPU.
struct Choice {
  const Target* target;
  int device_index;
};

// How a target fits the device that was chosen for it: "native", or "ptx" if the driver must compile its PTX.
std::string fit_of(const Choice& choice, const Host& host);

// How code for some architectures, and PTX of others, runs on the GPU that an architecture is named after: "native",
// "ptx" or "no".
std::string degree(const std::vector<std::string>& machine, const std::vector<std::string>& ptx,
                   const std::string& gpu);

// Such as "linux-x86_64".
std::string host_platform();

// Splits `auto`, `cpu`, `cuda` or `cuda:1` into kind and index: UsageError.
std::pair<std::string, std::optional<int>> parse_device(const std::string& device);

// The targets that run on a machine, best first, and the reason why each other target does not.
struct Survey {
  std::vector<Choice> fitting;
  std::vector<std::pair<const Target*, std::string>> rejected;
};

// Compares every target with a host. CUDA is better than CPU, newer instructions are better than older ones.
// UsageError; NoTargetError if no target runs here, with the reason for each.
// A target does not run where a library that it loads cannot find another one: the dynamic linker is asked for those.
Survey survey(std::span<const Target> targets, const std::vector<Library>& libraries, const std::string& device,
              const Host& host);

// The target of this name: UsageError if there is none, and the errors of `survey` if it does not run here.
Choice pick(const std::vector<Target>& targets, const std::vector<Library>& libraries, const std::string& device,
            const Host& host, const std::string& name);

// Why an operator library does not work with this torch version; nothing if it does.
std::optional<std::string> library_rejection(const Library& library, const std::string& torch);

// The highest level of this CPU, such as "x86-64-v3" or "armv8-a"; on machines without levels the machine's name.
std::string host_cpu_isa();

// One piece of code in a fat binary.
struct FatEntry {
  std::string architecture;   // such as "sm_90a"
  std::pair<int, int> ptx{};  // the version of PTX, such as (9, 0); (0, 0) for machine code
};

// The code in all fat binaries of a library. What is cut or no fat binary is left out.
std::vector<FatEntry> fat_entries(std::string_view code);

// The newest version of PTX in a library that has fat binaries, such as (9, 0); nothing if it has no PTX.
std::optional<std::pair<int, int>> newest_ptx(std::string_view code);

// Why a driver does not compile PTX of a version; nothing if it does. `driver` is the newest CUDA that it supports,
// such as "12.4". A driver compiles the PTX of its own CUDA and of older ones.
std::optional<std::string> ptx_rejection(const std::pair<int, int>& ptx, const std::string& driver);

}  // namespace exportkit
