// The weights of a package in memory.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "package/reader.h"

namespace exportkit {

// Mapped from the file, read-only: nothing is read before it is used, and processes share it. Where another user may
// write to the file, or has it open for that, what was verified is not what would be used: then they are read, and
// their digests checked, into memory of this process.
class WeightMapping {
 public:
  // DigestMismatchError of such a copy; std::system_error where there is no memory.
  explicit WeightMapping(const PackageReader& package);
  ~WeightMapping();
  WeightMapping(const WeightMapping&) = delete;
  WeightMapping& operator=(const WeightMapping&) = delete;

  // A weight's elements; null for what is no weight's record.
  const char* data(std::string_view record) const;
  bool is_copy() const { return copied_; }

 private:
  void map(const PackageReader& package);
  void copy(const PackageReader& package);

  bool copied_ = false;
  void* memory_ = nullptr;
  size_t size_ = 0;
  std::unordered_map<std::string, const char*> data_;  // by record
};

}  // namespace exportkit
