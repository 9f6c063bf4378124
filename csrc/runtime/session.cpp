#include <algorithm>

#include "package/errors.h"
#include "package/text.h"
#include "runtime/impl.h"
#include "runtime/streams.h"

namespace exportkit {
namespace {

bool writes_state(const Method& method) { return std::ranges::any_of(method.state, &StateUse::written); }

// Tells the methods which tensors their calls use.
void use(const std::vector<at::Tensor>& state, const Manifest& manifest, std::vector<StateInUse>& methods) {
  std::vector<Memory> memory;
  for (size_t i = 0; i < state.size(); ++i) {
    memory.push_back(memory_of(state[i], /*written=*/true, "the session's " + manifest.state[i].name));
  }
  for (size_t method = 0; method < methods.size(); ++method) {
    const std::vector<StateUse>& uses = manifest.methods[method].state;
    if (uses.empty()) continue;
    methods[method].tensors.clear();
    for (const StateUse& use : uses) methods[method].tensors.push_back(state[static_cast<size_t>(use.index)]);
    methods[method].memory = memory;
  }
}

// By method, the state that its calls use.
std::vector<StateInUse> in_use(const Manifest& manifest, const CurrentCode& code, const std::vector<at::Tensor>& state,
                               const Sizes& sizes) {
  std::vector<StateInUse> methods(manifest.methods.size());
  for (size_t method = 0; method < methods.size(); ++method) {
    if (manifest.methods[method].state.empty()) continue;  // it takes any sizes
    methods[method].sizes = sizes;
    methods[method].refused = code.get(method)->session_memory();
  }
  use(state, manifest, methods);
  return methods;
}

}  // namespace

Session::Impl::Impl(std::shared_ptr<Model::Impl> of, Sizes given, std::vector<at::Tensor> tensors,
                    std::set<size_t> of_others)
    : model(std::move(of)),
      sizes(std::move(given)),
      state(std::move(tensors)),
      shared(std::move(of_others)),
      methods(in_use(model->manifest(), model->code, state, sizes)),
      order(model->package.device()) {
  order.end();  // the tensors are filled on the current stream
}

void Session::Impl::own(size_t method) {
  if (shared.empty()) return;
  std::set<size_t> wanted;
  for (const StateUse& use : model->manifest().methods[method].state) {
    const auto index = static_cast<size_t>(use.index);
    if (use.written || model->initial.begins_as_zeros(index)) wanted.insert(index);
  }
  own(wanted);
}

void Session::Impl::own(const std::set<size_t>& wanted) {
  std::set<size_t> others;
  for (size_t i = 0; i < state.size(); ++i) {
    if (!shared.contains(i) || !wanted.contains(i)) others.insert(i);
  }
  if (others.size() == state.size()) return;
  std::vector<at::Tensor> copies = copies_of(state, others);
  const std::lock_guard lock(owning);
  state = std::move(copies);
  std::erase_if(shared, [&](size_t index) { return wanted.contains(index); });
  use(state, model->manifest(), methods);
}

// Also looks for what earlier calls refused.
void Session::Impl::need_whole() {
  for (size_t method = 0; !broken && method < methods.size(); ++method) {
    if (!methods[method].refused) continue;
    try {
      model->look(method, methods[method].refused);
    } catch (const Error& error) {
      if (writes_state(model->manifest().methods[method])) break_for("an earlier call failed: " + error.message());
      throw;
    }
  }
  if (!broken) return;
  throw Error(errors::kSessionBroken, "the session's state may be half written: " + problem,
              "Reset the session, or load a state: that makes it whole again.");
}

void Session::Impl::break_for(const std::string& why) noexcept {
  broken = true;
  try {
    problem = why;
  } catch (...) {  // there is no memory to say why
  }
}

// Replaces the state or a part of it: broken if that fails midway.
template <class Write>
void Session::Impl::replace(const char* what, const Write& write, bool whole) {
  break_for(what + std::string(" failed"));
  write();
  if (!whole) return void(broken = false);
  for (size_t method = 0; method < methods.size(); ++method) {  // what earlier calls refuse counts no longer
    if (methods[method].refused) methods[method].refused = model->code.get(method)->session_memory();
  }
  broken = false;
}

StreamOrder::StreamOrder(c10::Device device) : device_(device) {
  if (device_.is_cuda()) last_.emplace(device_.type());
}

void StreamOrder::begin(const std::vector<at::Tensor>& state) {
  if (!last_) return;
  const c10::Stream stream = current_stream(device_);
  if (last_->was_marked_for_recording()) last_->block(stream);
  if (!seen_.insert(stream.id()).second) return;
  for (const at::Tensor& tensor : state) tensor.record_stream(stream);
}

void StreamOrder::end() {
  if (last_) last_->record(current_stream(device_));
}

Turn::Turn(Session::Impl& session) : session_(session) {
  if (session_.busy.exchange(true, std::memory_order_acquire)) {
    throw Error(errors::kSessionBusy, "the session of " + session_.name() + " is running another call",
                "A session has one caller at a time. A fork, or another session of the model, serves another caller.");
  }
  try {
    session_.order.begin(session_.state);
  } catch (...) {
    session_.busy.store(false, std::memory_order_release);
    throw;
  }
}

Turn::~Turn() {
  try {
    session_.order.end();
  } catch (...) {  // the stream itself has failed; the next use of it says so
  }
  session_.busy.store(false, std::memory_order_release);
}

std::vector<at::Tensor> Session::Impl::run(size_t method, const std::vector<at::Tensor>& inputs) {
  const Turn turn(*this);
  need_whole();
  return run_in_turn(method, inputs);
}

std::vector<at::Tensor> Session::Impl::run_in_turn(size_t method, const std::vector<at::Tensor>& inputs) {
  const std::vector<at::Tensor> prepared = model->plans[method].prepare(inputs, &methods[method]);
  own(method);
  try {
    return model->run(method, prepared, &methods[method]);
  } catch (const std::exception& error) {
    const Method& failed = model->manifest().methods[method];
    if (writes_state(failed)) break_for("a call of " + failed.name + " failed: " + first_line(error.what()));
    throw;
  }
}

Session::Session(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Session Model::session(const std::map<std::string, int64_t>& sizes) const {
  if (impl_->state.empty()) {
    throw Error(errors::kUsage, name() + " has no state", "Call the model's methods: they need no session.");
  }
  check_sizes(impl_->state_dimensions, sizes, "the state of " + name());
  return Session(std::make_shared<Session::Impl>(impl_, sizes, impl_->initial.make(sizes), impl_->initial.lazy()));
}

std::vector<at::Tensor> Session::run(const std::vector<at::Tensor>& inputs) {
  return impl_->run(impl_->model->default_index(), inputs);
}

std::vector<at::Tensor> Session::run(const std::string& method, const std::vector<at::Tensor>& inputs) {
  return impl_->run(impl_->model->index_of(method), inputs);
}

void Session::Impl::wait_in_turn() {
  model->wait();
  need_whole();
  for (size_t method = 0; method < methods.size(); ++method) {  // those without state share the stream's memory
    if (!methods[method].refused) model->look(method, std::nullopt);
  }
}

void Session::synchronize() {
  const Turn turn(*impl_);
  impl_->wait_in_turn();
}

Session Session::fork() const {
  const Turn turn(*impl_);
  impl_->need_whole();
  return Session(
      std::make_shared<Impl>(impl_->model, impl_->sizes, copies_of(impl_->state, impl_->shared), impl_->shared));
}

void Session::reset() {
  const Turn turn(*impl_);
  impl_->replace("reset", [&] { impl_->model->initial.restore(impl_->state, impl_->shared); });
}

void Session::save(const std::string& path) const {
  const Turn turn(*impl_);
  impl_->need_whole();
  save_state(impl_->model->manifest(), impl_->state, path);
}

void Session::Impl::set(const StateTensors& values, std::optional<int64_t> row) {
  std::set<size_t> indices;
  for (const auto& [index, value] : values) indices.insert(index);
  own(indices);
  const auto write = [&] {
    for (const auto& [index, value] : values) (row ? state[index].narrow(0, *row, 1) : state[index]).copy_(value);
  };
  replace("load_state", write, values.size() == state.size() && !row);
}

void Session::load_state(const std::string& path) {
  const Turn turn(*impl_);
  impl_->set(read_state(impl_->model->manifest(), impl_->sizes, path), std::nullopt);
}

std::vector<std::string> Session::load_partial_state(const std::string& path, std::optional<int64_t> row) {
  const Turn turn(*impl_);
  impl_->need_whole();
  const Manifest& manifest = impl_->model->manifest();
  const StateTensors values = read_part_of_state(manifest, impl_->sizes, path, row.has_value());
  std::vector<std::string> names;
  for (const auto& [index, value] : values) {
    names.push_back(manifest.state[index].name);
    const int64_t rows = row ? impl_->state[index].size(0) : 0;
    if (!row || (*row >= 0 && *row < rows)) continue;
    throw Error(errors::kUsage, concat("row must be from 0 to ", rows - 1, ", got ", *row));
  }
  impl_->set(values, row);
  return names;
}

std::vector<std::pair<std::string, at::Tensor>> Session::state() const {
  std::unique_lock lock(impl_->owning);
  const bool whole = impl_->shared.empty();  // then nothing of it is replaced any more
  lock.unlock();
  if (!whole) {
    const Turn turn(*impl_);
    impl_->own(std::set<size_t>(impl_->shared));
  }
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (size_t i = 0; i < impl_->state.size(); ++i) named.emplace_back(impl_->model->state[i].name, impl_->state[i]);
  return named;
}

int64_t Session::state_bytes() const {
  int64_t bytes = 0;
  const std::lock_guard lock(impl_->owning);
  for (size_t i = 0; i < impl_->state.size(); ++i) {
    if (!impl_->shared.contains(i)) bytes += static_cast<int64_t>(impl_->state[i].nbytes());
  }
  return bytes;
}

bool Session::broken() const { return impl_->broken; }

}  // namespace exportkit
