// What the functions of the C interface have in common: options, results, calls.
#pragma once

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exportkit/exportkit.h"
#include "exportkit/runtime.h"
#include "package/errors.h"
#include "package/text.h"
#include "runtime/c_api_errors.h"
#include "runtime/dlpack_tensors.h"

namespace exportkit {

// The C structures that describe a model, with all that they point to.
class Description {
 public:
  // `model` must outlive this object: its strings are not copied.
  explicit Description(const Model& model);
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  const exportkit_description& c() const { return description_; }

 private:
  template <class Kept>
  const Kept& keep(Kept kept);
  template <class Structure>
  const Structure* const* pointers(std::vector<Structure> structures);
  const exportkit_tensor_info* const* tensors(const std::vector<TensorInfo>& described);
  const exportkit_dimension* const* dimensions(const std::vector<DimensionRange>& described);
  const exportkit_case_info* const* cases(const Model& model);

  std::vector<std::shared_ptr<const void>> kept_;
  const std::string device_;
  exportkit_description description_{};
};

// Strings of a model stay where they are: the description points to them.
struct OpenModel {
  Model model;
  Description description{model};
  std::mutex mutex;             // guards what follows
  std::set<std::string> texts;  // that a caller may read until the model is closed

  explicit OpenModel(Model opened) : model(std::move(opened)) {}
};

// ModelClosedError if there is none.
std::shared_ptr<OpenModel> find_model(exportkit_model handle);

struct OpenSession {
  exportkit_model model;
  Model of;
  Session session;
};

// SessionClosedError if there is none.
std::shared_ptr<OpenSession> find_session(exportkit_session handle);

// Closes the sessions of a model that was closed.
void close_sessions(exportkit_model model);

// The method of this name; the default one if the pointer is null. UsageError, which lists the methods.
const MethodInfo& method_named(const Model& model, const char* name);

constexpr size_t kMostBytes = 4096;  // of a structure; a size that was never set is probably greater

// A structure of a caller whose header is older or newer. Members that the caller does not have are zero, and those
// that this library does not have must be.
template <class Structure>
Structure members(const Structure* given, size_t least, const char* name) {
  Structure known{};
  if (given == nullptr) return known;
  if (given->size < least || given->size > kMostBytes) {
    throw Error(errors::kUsage, concat(name, ".size must be sizeof(", name, "), got ", given->size));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  const size_t common = std::min(given->size, sizeof known);
  if (std::any_of(bytes + common, bytes + given->size, [](unsigned char byte) { return byte != 0; })) {
    throw Error(errors::kUsage, concat(name, " has members that exportkit ", exportkit_version(), " does not know"),
                "Use the library of the header's version, or leave the new members zero.");
  }
  std::memcpy(&known, given, common);
  return known;
}

template <class Options>
Options read(const Options* given, size_t least, uint64_t known_flags, const char* name) {
  const Options options = members(given, least, name);
  if ((options.flags & ~known_flags) != 0) {
    throw Error(errors::kUsage, std::string(name) + ".flags has flags that exportkit " + exportkit_version() +
                                    " does not know: " + std::to_string(options.flags & ~known_flags));
  }
  return options;
}

// Where a caller gets tensors: zeros until all of them are there.
class Results {
 public:
  Results(DLManagedTensorVersioned** places, size_t count) : places_(places), count_(places == nullptr ? 0 : count) {
    std::fill_n(places_, count_, nullptr);
  }

  // UsageError if the caller gave another number of places.
  void expect(size_t wanted, size_t count, const char* name) const {
    if (count > 0) not_null(places_, name);
    if (count == wanted) return;
    throw Error(errors::kUsage, concat(name, " must have room for ", wanted, " tensors, got ", count));
  }

  // Nothing if the caller gave no places.
  void give(std::vector<ManagedTensor> tensors) noexcept {
    for (size_t i = 0; i < count_; ++i) places_[i] = tensors[i].release();
  }

 private:
  DLManagedTensorVersioned** places_;
  size_t count_;
};

std::vector<ManagedTensor> lend_all(const std::vector<at::Tensor>& tensors);

inline constexpr uint64_t kRunFlags = EXPORTKIT_HOST_TENSORS | EXPORTKIT_CONTIGUOUS_OUTPUTS | EXPORTKIT_OWN_STREAM;

exportkit_run_options run_options(const exportkit_run_options* given, uint64_t known_flags = kRunFlags);

// Makes the stream of the options the current one while it lives: UsageError.
class OnStream {
 public:
  OnStream(const Model& model, const exportkit_run_options& options);

 private:
  std::optional<c10::StreamGuard> guard_;
};

// Runs a method of the model, or of a session unless that is null, for a caller.
void run_for(const Model& model, Session* session, const char* method, const DLTensor* const* inputs,
             size_t input_count, Results& results, size_t output_count, const exportkit_run_options* options);

}  // namespace exportkit
