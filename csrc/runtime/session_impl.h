// What the copies of a Session share.
#pragma once

#include <c10/core/Event.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "exportkit/runtime.h"
#include "runtime/model_impl.h"

namespace exportkit {

// Calls on different streams wait for each other, and no memory is used again while one of them needs it.
class StreamOrder {
 public:
  explicit StreamOrder(c10::Device device);

  void begin(const std::vector<at::Tensor>& state);
  void end();

 private:
  c10::Device device_;
  std::optional<c10::Event> last_;
  std::set<c10::StreamId> seen_;
};

struct Session::Impl {
  std::shared_ptr<Model::Impl> model;
  Sizes sizes;
  std::vector<at::Tensor> state;
  std::set<size_t> shared;  // of `state`: tensors that other sessions have, too; those that it has once stay its own
  std::mutex owning;        // of `shared`, which others may look at while a call runs
  std::vector<StateInUse> methods;
  StreamOrder order;
  std::atomic<bool> busy = false, broken = false;
  std::string problem;  // why it is broken

  Impl(std::shared_ptr<Model::Impl> of, Sizes given, std::vector<at::Tensor> tensors, std::set<size_t> of_others);

  const std::string& name() const { return model->manifest().name; }

  // Throws if the state may be half written, or an earlier call refused a value.
  void need_whole();
  void break_for(const std::string& why) noexcept;
  template <class Write>
  void replace(const char* what, const Write& write, bool whole = true);
  // Copies values into the state, or into one row of it.
  void set(const StateTensors& values, std::optional<int64_t> row);
  // Makes the session's own copies of the shared tensors that a method writes, or of all. ModelRunError: no room.
  void own(size_t method);
  void own_all();

  std::vector<at::Tensor> run(size_t method, const std::vector<at::Tensor>& inputs);
  // The same, and Session::synchronize, for one who has the turn.
  std::vector<at::Tensor> run_in_turn(size_t method, const std::vector<at::Tensor>& inputs);
  void wait_in_turn();

 private:
  void own(const std::set<size_t>& wanted);
};

// The only use of a session while this object lives: SessionBusyError.
class Turn {
 public:
  explicit Turn(Session::Impl& session);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Session::Impl& session_;
};

}  // namespace exportkit
