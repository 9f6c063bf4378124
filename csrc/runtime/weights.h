// Weights outside of the compiled code, mapped from the package: nothing is read before it is used.
#pragma once

#include "runtime/package/reader.h"
#include "runtime/session.h"

namespace exportkit {

class MappedWeights {
 public:
  // Maps a package, if the target's code takes anything from outside. std::system_error where it cannot be mapped.
  MappedWeights(const PackageReader& reader, const Target& target);
  ~MappedWeights();
  MappedWeights(const MappedWeights&) = delete;
  MappedWeights& operator=(const MappedWeights&) = delete;

  // What the code takes from outside. The tensors may not be written to, nor outlive this.
  const Constants& constants() const { return constants_; }

 private:
  void* file_ = nullptr;
  size_t size_ = 0;
  Constants constants_;
};

}  // namespace exportkit
