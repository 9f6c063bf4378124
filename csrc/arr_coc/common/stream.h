// Writes rows past the caches: memory is not read first, and the caches keep other data. It is for tensors too large to
// be in the caches when they are read.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace arr_coc {

class RowStream {
 public:
  // `bytes`: all bytes that the operator writes.
  explicit RowStream(int64_t bytes) : past_caches_(bytes >= kLarge) {}
  ~RowStream() {
#if defined(__SSE2__)
    if (past_caches_) _mm_sfence();  // before another thread learns that the rows are written
#endif
  }
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  bool past_caches() const { return past_caches_; }

  template <class T>
  void copy(const T* from, int64_t size, T* to) const {
#if defined(__SSE2__)
    const int64_t bytes = size * int64_t(sizeof(T));
    if (past_caches_ && reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0 &&
        bytes % int64_t(sizeof(__m128i)) == 0) {
      const auto* in = reinterpret_cast<const __m128i*>(from);
      auto* out = reinterpret_cast<__m128i*>(to);
      for (int64_t i = 0; i < bytes / int64_t(sizeof(__m128i)); ++i) _mm_stream_si128(out + i, _mm_loadu_si128(in + i));
      return;
    }
#endif
    std::copy_n(from, size, to);
  }

 private:
  static constexpr int64_t kLarge = int64_t{16} << 20;
  bool past_caches_;
};

}  // namespace arr_coc
