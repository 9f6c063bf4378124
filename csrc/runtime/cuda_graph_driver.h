// The functions of the CUDA driver that make and launch graphs. 0 is success, as in cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace exportkit {

struct GraphDriver {
  static constexpr int kThreadLocal = 1;         // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may do anything
  static constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING: the default stream does not wait for it

  int (*make_stream)(void** stream, unsigned flags);
  int (*begin)(void* stream, int mode);
  int (*end)(void* stream, void** graph);
  int (*capture_info)(void* stream, int* status, uint64_t* id, void** graph, const void*** nodes, size_t* count);
  int (*instantiate)(void** launchable, void* graph, unsigned long long flags);
  int (*launch)(void* launchable, void* stream);
  int (*destroy)(void* graph);
  int (*destroy_launchable)(void* launchable);
  int (*nodes)(void* graph, void** nodes, size_t* count);
  int (*node_type)(void* node, int* type);
  int (*copy_of)(void* node, void* copy);
  int (*pointer_attribute)(void* value, int attribute, uint64_t pointer);
  int (*error_text)(int error, const char** text);

  static const GraphDriver& get();

  // c10::Error with `what` and the driver's own words if `error` is one.
  void check(int error, const char* what) const;
  // The number of the capture that a stream is in; 0 if it is in none.
  unsigned long long capture_of(void* stream) const;
  // c10::Error if a graph has a node that does not repeat what it did: it calls the host, copies from or to the host's
  // memory, which may be other memory by then, or allocates memory that torch does not know.
  void check_nodes(void* graph) const;
};

}  // namespace exportkit
