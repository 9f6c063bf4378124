// Finds memory that is written and used elsewhere, too.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

namespace exportkit {

// Sorts uses of memory, which have `begin`, `end` and `written`, and returns two that overlap if one of them writes.
// It returns two null pointers if no two overlap so.
template <class Use>
std::pair<const Use*, const Use*> overlapping(std::vector<const Use*>& uses) {
  std::sort(uses.begin(), uses.end(), [](const Use* one, const Use* other) { return one->begin < other->begin; });
  const Use *furthest = nullptr, *furthest_written = nullptr;  // of those before, which reach the furthest
  for (const Use* const use : uses) {
    const Use* const other = use->written ? furthest : furthest_written;
    if (other != nullptr && use->begin < other->end) return {other, use};
    if (furthest == nullptr || use->end > furthest->end) furthest = use;
    if (use->written && (furthest_written == nullptr || use->end > furthest_written->end)) furthest_written = use;
  }
  return {nullptr, nullptr};
}

}  // namespace exportkit
