// Levels of CPU instructions, which targets name and CPUs have.
#pragma once

#include <string>
#include <string_view>

namespace exportkit {

// Returns a level's rank on a platform such as "linux-aarch64"; -1 if the platform does not have it. A CPU runs code
// of its own level and of lower ranks.
int cpu_level_rank(std::string_view platform, std::string_view level);

// The highest level of this CPU, such as "x86-64-v3" or "armv8-a"; on machines without levels the machine's name.
std::string host_cpu_isa();

}  // namespace exportkit
