// What a fork waits for, and what waits for a fork. A fork has one thread, the one that forked: what another one was in
// the middle of never ends there, and who waits for it, as for a lock, waits forever.
#pragma once

namespace exportkit {

// Work that no fork may cut in two, as long as this lives. A thread may nest it.
class Work {
 public:
  Work();
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
};

// Waits until no thread works, and lets none begin until the other one is called, in the parent and in the child. Work
// may need Python's lock: it must not be held here.
void before_fork();
void after_fork(bool child);

}  // namespace exportkit
