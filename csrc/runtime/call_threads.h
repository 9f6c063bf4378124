// The number of CPU threads of a call.
#pragma once

#include <cstdint>

namespace exportkit {

// While it lives, what this thread calls has so many threads; 0: as many as before. at::set_num_threads would change
// threads that begin meanwhile, too.
class CallThreads {
 public:
  explicit CallThreads(int64_t count);
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;
  CallThreads& operator=(const CallThreads&) = delete;

 private:
  int before_ = 0, of_mkl_ = 0;  // 0: unchanged
};

}  // namespace exportkit
