// Finds out whether the rows of one request influence another's.
#pragma once

#include <cstdint>
#include <string>

#include "exportkit/runtime.h"

namespace exportkit {

struct TriedRows {
  int64_t most;           // rows of a call; 0: each request runs by itself
  std::string reason;     // then, why
  bool bit_equal = true;  // answers had the same bits, however requests were put together
};

// Rows of the recorded cases are called in small requests, then together, in calls of two requests, four, and so on.
// Where the cases have fewer rows, rows of floating inputs are rolled to make others. A method with state plays its
// first recorded sequence so. Throws the errors of Model::recorded_case.
TriedRows try_rows(const Model& model, const MethodInfo& method, int64_t most);

}  // namespace exportkit
