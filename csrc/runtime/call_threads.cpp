#include "runtime/call_threads.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace exportkit {
namespace {

// torch's own OpenMP library, which compiled code uses as well, and the MKL in torch. Null where torch has none.
struct Setters {
  void (*of_openmp)(int);
  int (*of_mkl)(int);  // returns the number before; 0 if none was set
};

const Setters& setters() {
  static const Setters found = [] {
    void* const torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);  // its dependencies are searched, too
    if (torch == nullptr) return Setters{};
    return Setters{reinterpret_cast<void (*)(int)>(dlsym(torch, "omp_set_num_threads")),
                   reinterpret_cast<int (*)(int)>(dlsym(torch, "MKL_Set_Num_Threads_Local"))};
  }();
  return found;
}

}  // namespace

CallThreads::CallThreads(int64_t count) {
  if (count == 0 || setters().of_openmp == nullptr) return;
  before_ = at::get_num_threads();  // a thread's first use of torch sets its number
  if (before_ == count) {
    before_ = 0;
    return;
  }
  setters().of_openmp(static_cast<int>(count));
  if (setters().of_mkl != nullptr) of_mkl_ = setters().of_mkl(static_cast<int>(count));
}

CallThreads::~CallThreads() {
  if (before_ == 0) return;
  setters().of_openmp(before_);
  if (setters().of_mkl != nullptr) setters().of_mkl(of_mkl_);
}

}  // namespace exportkit
