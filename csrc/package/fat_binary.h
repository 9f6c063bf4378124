// What NVIDIA's fat binaries say of their code. Their format is not documented; tests hold this to what nvcc writes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace exportkit {

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
