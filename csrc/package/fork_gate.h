// Blocks fork() until no thread is inside a call of this library. The child keeps only the forking thread, so a lock
// held by another thread would never be released there.
#pragma once

namespace exportkit {

// Marks work that a fork must not interrupt while this object lives. A thread may nest it.
class Work {
 public:
  Work();
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
};

// before_fork waits until no thread works. No work starts until after_fork is called, in the parent and in the child.
// Do not hold Python's GIL here, because the work may need it.
void before_fork();
void after_fork(bool child);

}  // namespace exportkit
