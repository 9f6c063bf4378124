#include "runtime/refused_values.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstring>
#include <deque>
#include <sstream>

#include "runtime/streams.h"

namespace exportkit {
namespace {

constexpr char kPlaces[] = "exportkit_refused_places";  // of exportkit/package/compiled_with.py
constexpr size_t kPlaceCount = 64;
constexpr int64_t kLength = 1 + 2 * kPlaceCount;
constexpr size_t kLate = 64;  // blocks that rest before they are used again

// Pinned memory of closed sessions and models. A kernel that still runs may write into it, so it is never freed, and it
// rests before others get it.
class Pinned {
 public:
  static Pinned& all() {
    static auto& pinned = *new Pinned;
    return pinned;
  }

  at::Tensor take() {
    {
      const std::lock_guard lock(mutex_);
      if (resting_.size() > kLate) {
        at::Tensor memory = std::move(resting_.front());
        resting_.pop_front();
        memory.zero_();
        return memory;
      }
    }
    return at::zeros({kLength}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  }
  void rest(at::Tensor memory) {
    const std::lock_guard lock(mutex_);
    resting_.push_back(std::move(memory));
  }

 private:
  std::mutex mutex_;
  std::deque<at::Tensor> resting_;
};

// A GPU reads and writes pinned memory at the address that the host has for it.
at::Tensor seen_by(c10::Device device, const at::Tensor& pinned) {
  return at::for_blob(pinned.mutable_data_ptr(), pinned.sizes())
      .options(pinned.options().device(device).pinned_memory(false))
      .target_device(device)
      .deleter([pinned](void*) { Pinned::all().rest(pinned); })
      .make_tensor();
}

}  // namespace

RefusedValues::RefusedValues(const std::filesystem::path& library, c10::Device device) : device_(device) {
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (opened == nullptr) return;
  const auto places = reinterpret_cast<const char* (*)()>(dlsym(opened, kPlaces));
  if (places != nullptr) {
    std::istringstream lines(places());
    std::string line;
    std::getline(lines, line);
    arguments_ = std::stoul(line);
    while (std::getline(lines, line) && places_.size() < kPlaceCount) {
      const size_t tab = line.find('\t');
      places_.push_back({line.substr(0, tab), tab == std::string::npos ? "" : line.substr(tab + 1)});
    }
  }
  dlclose(opened);
}

at::Tensor RefusedValues::take() const {
  if (!device_.is_cpu()) return seen_by(device_, Pinned::all().take());
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      at::Tensor memory = std::move(free_.back());
      free_.pop_back();
      return memory;
    }
  }
  return at::zeros({kLength}, at::kLong);
}

void RefusedValues::give_back(at::Tensor memory) const {
  if (!device_.is_cpu()) return;  // its last reference gives it to the others
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(memory));
}

at::Tensor RefusedValues::of_stream() const {
  const int64_t stream = current_stream(device_).id();
  const std::lock_guard lock(mutex_);
  at::Tensor& memory = streams_[stream];
  if (!memory.defined()) memory = take();
  return memory;
}

void RefusedValues::look(const at::Tensor& memory) const {
  auto* const said = static_cast<int64_t*>(memory.data_ptr());
  if (__atomic_load_n(said, __ATOMIC_RELAXED) == 0) return;
  wait_for_device(device_);  // whoever wrote it may still write the rest
  const std::string message = this->message(said);
  std::memset(said, 0, kLength * sizeof(int64_t));
  TORCH_CHECK(false, kRefusedValue, message);
}

std::string RefusedValues::message(const int64_t* memory) const {
  for (size_t i = 0; i < places_.size(); ++i) {
    const int64_t size = memory[2 + 2 * i];
    if (size == 0) continue;
    const auto& [kind, operators] = places_[i];
    const std::string at = operators.empty() ? "" : operators + ": ";
    if (kind == "division") return at + "an integer is divided by zero";
    if (kind.empty()) break;  // one of many that share a place
    if (kind.rfind("index", 0) != 0) return at + kind;
    const int64_t length = (size < 0 ? -size : size) - 1;
    const bool wraps = kind != "index";  // negative ones count from the end, and had the length added
    const int64_t value = memory[1 + 2 * i], given = wraps && value < 0 ? value - length : value;
    return at + (size < 0 ? "an index" : "index " + std::to_string(given)) + " is out of range: from " +
           std::to_string(wraps ? -length : 0) + " to " + std::to_string(length - 1) + " are allowed";
  }
  return "the code refused a value";
}

}  // namespace exportkit
