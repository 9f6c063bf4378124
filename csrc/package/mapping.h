// The weights of a package in memory.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "package/atomic.h"
#include "package/reader.h"

namespace exportkit {

// Weights are mapped from the file read-only: they are read when used, and processes share them. If another user can
// write to the file, or may have it open for writing, the content may change after verification. Then the weights are
// copied into this process's memory and their digests checked. So are those of a file that belongs to another user,
// root included, and of a signed package on a file system without leases, where nobody can tell who has it open. Sealed
// memory never changes, and is mapped whoever made it.
class WeightMapping {
 public:
  // DigestMismatchError if a copied record is wrong; std::system_error without enough memory.
  explicit WeightMapping(const PackageReader& package);
  ~WeightMapping();
  WeightMapping(const WeightMapping&) = delete;
  WeightMapping& operator=(const WeightMapping&) = delete;

  // A weight's elements; null if the record is not a weight's.
  const char* data(std::string_view record) const;

 private:
  WeightMapping() = default;
  void map(const PackageReader& package);
  void copy(const PackageReader& package);

  Descriptor file_;  // if it is mapped
  void* memory_ = nullptr;
  size_t size_ = 0;
  std::unordered_map<std::string, const char*> data_;  // by record
};

// Copies memory. Weights that are mapped are read from their file, which is faster and leaves this process without
// pages of them. Error if that file was cut short, where a mapping would end the process.
void read_weights(const char* from, char* to, size_t bytes);

}  // namespace exportkit
