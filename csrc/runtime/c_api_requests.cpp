// Several requests in one call of the C interface.
#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <span>
#include <utility>

#include "package/errors.h"
#include "package/text.h"
#include "runtime/c_api_calls.h"
#include "runtime/inputs.h"
#include "runtime/joined_steps.h"
#include "runtime/request_inputs.h"

namespace exportkit {
namespace {

constexpr size_t kLeastAnswers = 32, kLeastRequest = 40;  // sizes of the structures when they were first released

// The sizes that requests of one call have in common: all but the first.
std::vector<int64_t> common_sizes(const std::vector<RequestInput>& inputs) {
  std::vector<int64_t> common;
  for (const RequestInput& input : inputs) common.insert(common.end(), input.sizes.begin() + 1, input.sizes.end());
  return common;
}

// Brings the outputs of a call to where the callers of its requests want them.
class RequestAnswers {
 public:
  // The answers' memory may be on the CPU or on `device`.
  RequestAnswers(const MethodInfo& method, std::vector<at::Tensor> outputs, c10::Device device,
                 const exportkit_answers& answers)
      : method_(method),
        outputs_(std::move(outputs)),
        fetched_(outputs_.size()),
        device_(device),
        answers_(answers),
        on_device_(device) {
    for (at::Tensor& output : outputs_) output = output.resolve_conj().resolve_neg().contiguous();
  }

  // Asks for memory for `rows` rows from `first` on of each output; -1: for all of it. Throws if there is none.
  void place(size_t request, int64_t first, int64_t rows) {
    for (size_t output = 0; output < outputs_.size(); ++output) place_output(request, output, first, rows);
  }

  // Begins to copy on the current stream.
  void begin() {
    for (const Copy& copy : copies_) on_cpu(copy.output);
    on_device_.begin();
  }

  // Ends the copies, after the current stream was waited for.
  void finish() const {
    for (const Copy& copy : copies_) {
      std::memcpy(copy.to, static_cast<const char*>(fetched_[copy.output].const_data_ptr()) + copy.offset, copy.bytes);
    }
  }

 private:
  struct Copy {
    size_t output;
    uint64_t offset, bytes;
    void* to;
  };

  void place_output(size_t request, size_t output, int64_t first, int64_t rows) {
    const at::Tensor& whole = outputs_[output];
    std::vector<int64_t> shape = whole.sizes().vec();
    Copy copy{output, 0, whole.nbytes(), nullptr};
    if (rows >= 0) {
      const uint64_t row = shape[0] > 0 ? whole.nbytes() / static_cast<uint64_t>(shape[0]) : 0;
      copy.offset = static_cast<uint64_t>(first) * row, copy.bytes = static_cast<uint64_t>(rows) * row;
      shape[0] = rows;
    }
    DLDevice place{kDLCPU, 0};
    const int wanted =
        answers_.place(request, output, dl_dtype(whole.scalar_type()), static_cast<int32_t>(shape.size()), shape.data(),
                       copy.bytes, &copy.to, &place, answers_.context);
    const std::string what = "`" + method_.outputs[output].name + "` of request " + std::to_string(request);
    if (wanted < 0) {
      throw Error(kMemory, "there is no memory for " + what + ": place returned " + std::to_string(wanted));
    }
    if (wanted == 0 || copy.bytes == 0) return;
    const c10::Device device = device_of(place, "the place of " + what, device_);
    not_null(copy.to, ("the place of " + what).c_str());
    if (device.is_cpu()) {
      copies_.push_back(copy);
      return;
    }
    bytes_at(copy.to, copy.bytes, device_);
    on_device_.add(copy.to, static_cast<const char*>(whole.const_data_ptr()) + copy.offset, copy.bytes);
  }

  // Brings an output to memory of the CPU, where it is once the current stream was waited for.
  void on_cpu(size_t output) {
    at::Tensor& fetched = fetched_[output];
    const at::Tensor& made = outputs_[output];
    if (fetched.defined()) return;
    if (made.is_cpu()) {
      fetched = made;
      return;
    }
    fetched = at::empty(made.sizes(), at::TensorOptions(made.scalar_type()).pinned_memory(true));
    fetched.copy_(made, /*non_blocking=*/true);
  }

  const MethodInfo& method_;
  std::vector<at::Tensor> outputs_, fetched_;
  const c10::Device device_;
  const exportkit_answers& answers_;
  std::vector<Copy> copies_;  // to the CPU
  DeviceCopies on_device_;
};

// Runs several requests, together where they fit together.
class RequestRun {
 public:
  // The structures `requests` and `answers` were checked, and the method writes into no input.
  RequestRun(OpenModel& open, exportkit_model handle, const MethodInfo& method,
             std::span<exportkit_request* const> requests, const exportkit_answers& answers)
      : handle_(handle),
        model_(*open.model.impl()),
        info_(method),
        method_(static_cast<size_t>(&method - model_.methods.data())),
        given_(requests),
        answers_(answers),
        ended_(requests.size()) {}

  // Runs and ends all. A call of several has at most `most` rows. If this throws, no request was run or has an error.
  void operator()(int64_t most) {
    std::vector<Request> requests;
    std::vector<Group> all;
    try {
      requests = all_checked();
      const int64_t greatest = info_.row_dimension ? info_.dimensions[*info_.row_dimension].max : 0;
      all = groups(requests, std::min(most, greatest));
    } catch (...) {  // there is no memory
      for (exportkit_request* request : given_) exportkit_error_free(std::exchange(request->error, nullptr));
      throw;
    }
    for (size_t index = 0; index < given_.size(); ++index) {
      if (given_[index]->error != nullptr) end(index);
    }
    for (const Group& group : all) run_group(group);
  }

 private:
  struct Request {
    size_t index;
    std::vector<RequestInput> inputs;
    std::shared_ptr<OpenSession> open;  // null without state
    int64_t rows;                       // 0 where the method has none
  };
  using Group = std::vector<const Request*>;
  // A request in a call, with the turn of its session.
  struct Member {
    const Request* request;
    std::unique_ptr<Turn> turn;
  };
  using Tensors = std::vector<at::Tensor>;

  static Session::Impl* session_of(const Request& request) {
    return request.open == nullptr ? nullptr : request.open->session.impl().get();
  }

  Request checked(size_t index) const {
    const exportkit_request given = members(given_[index], kLeastRequest, "exportkit_request");
    Request request{index, {}, {}, 0};
    check_count(info_.inputs, given.input_count);
    if (given.input_count > 0) not_null(given.inputs, "inputs");
    if (info_.stateful) {
      if (given.session == 0) throw Error(errors::kUsage, info_.name + " has state: session must not be 0");
      request.open = find_session(given.session);
      if (request.open->model != handle_) throw Error(errors::kUsage, "session belongs to another model");
    } else if (given.session != 0) {
      throw Error(errors::kUsage,
                  info_.name + " has no state: session must be 0, got " + std::to_string(given.session));
    }
    for (size_t i = 0; i < given.input_count; ++i) {
      request.inputs.push_back(read_input(given.inputs[i], info_.inputs[i].name, model_.package.device()));
    }
    std::vector<InputShape> shapes;
    for (const RequestInput& input : request.inputs) shapes.push_back({input.dtype, input.sizes});
    const Session::Impl* const session = session_of(request);
    model_.plans[method_].check(shapes, session == nullptr ? nullptr : &session->methods[method_]);
    if (info_.row_dimension) request.rows = request.inputs.front().sizes.front();
    return request;
  }

  // Those that can run. The others have their errors.
  std::vector<Request> all_checked() const {
    std::vector<Request> requests;
    requests.reserve(given_.size());
    for (size_t index = 0; index < given_.size(); ++index) {
      try {
        requests.push_back(checked(index));
      } catch (...) {
        failed(&given_[index]->error);
      }
    }
    return requests;
  }

  // In the order of arrival, but a session's second request is in a later group than its first.
  static std::vector<Group> groups(const std::vector<Request>& requests, int64_t most) {
    struct Open {
      size_t turn;
      int64_t rows;
      Group group;
    };
    std::vector<Open> all;
    std::map<std::pair<size_t, std::vector<int64_t>>, size_t> open;  // by turn and sizes, the group that takes more
    std::map<const Session::Impl*, size_t> turns;
    for (const Request& request : requests) {
      const Session::Impl* const session = session_of(request);
      const size_t turn = session == nullptr ? 0 : turns[session]++;
      if (most < 2) {
        all.push_back({turn, request.rows, {&request}});
        continue;
      }
      const auto [place, is_new] = open.try_emplace({turn, common_sizes(request.inputs)}, all.size());
      if (!is_new && all[place->second].rows <= most - request.rows) {
        all[place->second].rows += request.rows;
        all[place->second].group.push_back(&request);
        continue;
      }
      place->second = all.size();
      all.push_back({turn, request.rows, {&request}});
    }
    std::stable_sort(all.begin(), all.end(), [](const Open& one, const Open& other) { return one.turn < other.turn; });
    std::vector<Group> ordered;
    for (Open& each : all) ordered.push_back(std::move(each.group));
    return ordered;
  }

  void run_group(const Group& group) noexcept {
    try {
      std::vector<Member> members;
      for (const Request* request : group) {
        try {
          Member member{request, nullptr};
          if (Session::Impl* const session = session_of(*request)) {
            member.turn = std::make_unique<Turn>(*session);
            session->need_whole();
          }
          members.push_back(std::move(member));
        } catch (...) {
          fail(request->index);
        }
      }
      if (members.size() > 1 && ran(members)) return;
      for (Member& member : members) ran({&member, 1});
    } catch (...) {
      for (const Request* request : group) {
        if (!ended_[request->index]) fail(request->index);
      }
    }
  }

  // Runs requests in one call and ends them. False if that fails for several: none has ended then.
  bool ran(std::span<Member> members) {
    const std::shared_ptr<const Code> code = model_.code.get(method_);
    auto workspace = code->workspaces().take();
    const auto end_of_use = c10::make_scope_exit([&] { code->workspaces().give_back(std::move(workspace)); });
    Tensors outputs;
    try {
      outputs = outputs_of(members, *workspace);
    } catch (...) {
      wait_after_failure();
      if (members.size() > 1) return false;
      members.front().turn.reset();
      fail(members.front().request->index);
      return true;
    }
    answer(members, std::move(outputs), *workspace);
    return true;
  }

  // What ran before a failure may still use the memory of requests and workspace.
  void wait_after_failure() const noexcept {
    try {
      model_.wait();
    } catch (const std::exception&) {  // the device is broken
    }
  }

  // Returns what a call returned. A GPU may still run the call if it is one request's, without state. Others have
  // ended.
  Tensors outputs_of(std::span<const Member> members, Workspace& workspace) const {
    std::vector<const std::vector<RequestInput>*> given;
    for (const Member& member : members) given.push_back(&member.request->inputs);
    const Tensors inputs = joined(given, model_.package.device(), workspace.inputs);
    const bool several = members.size() > 1;
    if (!info_.stateful) return run_stateless(model_, method_, inputs, several, workspace);
    std::vector<Session::Impl*> sessions;
    for (const Member& member : members) sessions.push_back(session_of(*member.request));
    if (several) return run_joined(model_, method_, sessions, inputs, workspace);
    sessions.front()->need_whole();
    Tensors outputs = sessions.front()->run_in_turn(method_, inputs);
    sessions.front()->wait_in_turn();
    check_outputs(info_, outputs, -1);
    return outputs;
  }

  // When a request ends, its memory and its session are the caller's. Outputs may be a part of the session's state.
  // Where the call still runs, the copies follow it, and are waited for with it.
  void answer(std::span<Member> members, Tensors outputs, const Workspace& workspace) {
    RequestAnswers answers(info_, std::move(outputs), model_.package.device(), answers_);
    std::vector<std::exception_ptr> problems(members.size());
    const auto noted = [](std::exception_ptr& problem, const auto& act) {
      try {
        act();
      } catch (...) {
        problem = std::current_exception();
      }
    };
    int64_t row = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      const Request& request = *members[i].request;
      noted(problems[i], [&] { answers.place(request.index, row, members.size() > 1 ? request.rows : -1); });
      row += request.rows;
    }
    try {
      answers.begin();
      model_.wait();
    } catch (...) {
      wait_after_failure();
      throw;
    }
    if (members.size() == 1 && !info_.stateful)
      noted(problems.front(), [&] { model_.look(method_, workspace.refused); });
    answers.finish();
    for (Member& member : members) member.turn.reset();
    for (size_t i = 0; i < members.size(); ++i) {
      try {
        if (problems[i]) std::rethrow_exception(problems[i]);
        end(members[i].request->index);
      } catch (...) {
        fail(members[i].request->index);
      }
    }
  }

  void end(size_t index) noexcept {
    ended_[index] = true;
    if (answers_.ended != nullptr) answers_.ended(index, answers_.context);
  }

  // Ends a request with the exception that is being handled.
  void fail(size_t index) noexcept {
    failed(&given_[index]->error);
    end(index);
  }

  const exportkit_model handle_;
  const Model::Impl& model_;
  const MethodInfo& info_;
  const size_t method_;
  const std::span<exportkit_request* const> given_;
  const exportkit_answers& answers_;
  std::vector<bool> ended_;
};

exportkit_answers answers_of(const exportkit_answers* given) {
  const exportkit_answers answers = members(not_null(given, "answers"), kLeastAnswers, "exportkit_answers");
  not_null(answers.place, "place");
  return answers;
}

// UsageError if a request has no room for its own error. It concerns all requests then.
std::span<exportkit_request* const> requests_of(exportkit_request* const* given, size_t count) {
  if (count > 0) not_null(given, "requests");
  for (size_t i = 0; i < count; ++i) {
    const std::string name = "requests[" + std::to_string(i) + "]";
    exportkit_request& request = *not_null(given[i], name.c_str());
    if (request.size < sizeof request || request.size > kMostBytes) {
      throw Error(errors::kUsage, concat(name, ".size must be sizeof(exportkit_request), got ", request.size));
    }
    request.error = nullptr;
  }
  return {given, count};
}

void check_method(const MethodInfo& method) {
  for (const TensorInfo& input : method.inputs) {
    if (!input.written) continue;
    throw Error(errors::kUsage,
                method.name + " writes into its input `" + input.name + "`, which a request does not get back",
                "exportkit_run_method runs it.");
  }
}

}  // namespace
}  // namespace exportkit

using namespace exportkit;

int exportkit_run_requests(exportkit_model model, const char* method, exportkit_request* const* requests,
                           size_t request_count, int64_t most, const exportkit_answers* answers,
                           const exportkit_run_options* options, exportkit_error** error) noexcept {
  return attempt(error, [&] {
    const std::span<exportkit_request* const> given = requests_of(requests, request_count);
    const std::shared_ptr<OpenModel> open = find_model(model);
    const MethodInfo& named = method_named(open->model, method);
    check_method(named);
    if (most < 0) throw Error(errors::kUsage, "most must not be negative, got " + std::to_string(most));
    const exportkit_answers where = answers_of(answers);
    const OnStream on_stream(open->model, run_options(options, EXPORTKIT_OWN_STREAM));
    RequestRun(*open, model, named, given, where)(most);
  });
}

int exportkit_try_rows(exportkit_model model, const char* method, int64_t most, int64_t* rows, const char** reason,
                       exportkit_error** error) noexcept {
  if (rows != nullptr) *rows = 0;
  if (reason != nullptr) *reason = nullptr;
  return attempt(error, [&] {
    not_null(rows, "rows"), not_null(reason, "reason");
    const std::shared_ptr<OpenModel> open = find_model(model);
    const MethodInfo& named = method_named(open->model, method);
    if (most < 0) throw Error(errors::kUsage, "most must not be negative, got " + std::to_string(most));
    const TriedRows tried = try_rows(open->model, named, most);
    if (tried.most == 0) {
      const std::lock_guard lock(open->mutex);
      *reason = open->texts.insert(tried.reason).first->c_str();
    }
    *rows = tried.most;
  });
}
