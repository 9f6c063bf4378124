// Objects that others refer to by numbers.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>

namespace exportkit {

// Any number of threads may use it. Who gets an object keeps it alive, so it can finish a call after a removal. Numbers
// are not used twice.
template <class Object>
class Handles {
 public:
  int64_t add(std::shared_ptr<Object> object) {
    const std::unique_lock lock(mutex_);
    objects_.emplace(last_ + 1, std::move(object));
    return ++last_;
  }

  // Null if the number belongs to nothing.
  std::shared_ptr<Object> get(int64_t handle) const {
    const std::shared_lock lock(mutex_);
    const auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  // Removes the objects that fit, and destroys them outside of the lock.
  template <class Fits>
  void remove_if(const Fits& fits) {
    std::map<int64_t, std::shared_ptr<Object>> removed;
    const std::unique_lock lock(mutex_);
    for (auto place = objects_.begin(); place != objects_.end();) {
      const auto next = std::next(place);
      if (fits(*place->second)) removed.insert(objects_.extract(place));  // which allocates nothing
      place = next;
    }
  }

  // Returns the object, which the caller destroys outside of the lock: unloading is slow. Null as above.
  std::shared_ptr<Object> remove(int64_t handle) {
    const std::unique_lock lock(mutex_);
    auto node = objects_.extract(handle);
    return node.empty() ? nullptr : std::move(node.mapped());
  }

 private:
  mutable std::shared_mutex mutex_;
  std::map<int64_t, std::shared_ptr<Object>> objects_;
  int64_t last_ = 0;
};

// The open objects of a kind. Never destroyed: at exit, torch's static objects may be destroyed before ours.
template <class Object>
Handles<Object>& handles() {
  static auto& all = *new Handles<Object>;
  return all;
}

}  // namespace exportkit
