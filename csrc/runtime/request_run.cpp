#include "runtime/request_run.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "runtime/inputs.h"
#include "runtime/joined_steps.h"
#include "runtime/request_answers.h"

namespace exportkit {
namespace {

constexpr size_t kLeastRequest = 40;  // the size of the structure when it was first released

// The sizes that requests of one call have in common: all but the first.
std::vector<int64_t> common_sizes(const std::vector<RequestInput>& inputs) {
  std::vector<int64_t> common;
  for (const RequestInput& input : inputs) common.insert(common.end(), input.sizes.begin() + 1, input.sizes.end());
  return common;
}

}  // namespace

RequestRun::RequestRun(OpenModel& open, exportkit_model handle, const MethodInfo& method,
                       std::span<exportkit_request* const> requests, const exportkit_answers& answers)
    : open_(open),
      handle_(handle),
      model_(*open.model.impl()),
      info_(method),
      method_(static_cast<size_t>(&method - model_.methods.data())),
      given_(requests),
      answers_(answers),
      ended_(requests.size()) {}

void RequestRun::operator()(int64_t most) {
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

Session::Impl* RequestRun::session_of(const Request& request) {
  return request.open == nullptr ? nullptr : request.open->session.impl().get();
}

RequestRun::Request RequestRun::checked(size_t index) const {
  const exportkit_request given = members(given_[index], kLeastRequest, "exportkit_request");
  Request request{index, {}, {}, 0};
  check_count(info_.inputs, given.input_count);
  if (given.input_count > 0) not_null(given.inputs, "inputs");
  if (info_.stateful) {
    if (given.session == 0) throw Error(errors::kUsage, info_.name + " has state: session must not be 0");
    request.open = find_session(given.session);
    if (request.open->model != handle_) throw Error(errors::kUsage, "session belongs to another model");
  } else if (given.session != 0) {
    throw Error(errors::kUsage, info_.name + " has no state: session must be 0, got " + std::to_string(given.session));
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
std::vector<RequestRun::Request> RequestRun::all_checked() const {
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
std::vector<RequestRun::Group> RequestRun::groups(const std::vector<Request>& requests, int64_t most) {
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

void RequestRun::run_group(const Group& group) noexcept {
  try {
    std::vector<Member> members;
    for (const Request* request : group) {
      try {
        Session::Impl* const session = session_of(*request);
        members.push_back({request, session == nullptr ? nullptr : std::make_unique<Turn>(*session)});
        if (session != nullptr) session->need_whole();
      } catch (...) {
        if (!members.empty() && members.back().request == request) members.pop_back();
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
bool RequestRun::ran(std::span<Member> members) {
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
void RequestRun::wait_after_failure() const noexcept {
  try {
    model_.wait();
  } catch (const std::exception&) {  // the device is broken
  }
}

// Returns what a call returned. A GPU may still run the call if it is one request's, without state. Others have ended.
RequestRun::Tensors RequestRun::outputs_of(std::span<const Member> members, Workspace& workspace) const {
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

// When a request ends, its memory and its session are the caller's. Outputs may be a part of the session's state. Where
// the call still runs, the copies follow it, and are waited for with it.
void RequestRun::answer(std::span<Member> members, Tensors outputs, const Workspace& workspace) {
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
  if (members.size() == 1 && !info_.stateful) noted(problems.front(), [&] { model_.look(method_, workspace.refused); });
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

void RequestRun::end(size_t index) noexcept {
  ended_[index] = true;
  if (answers_.ended != nullptr) answers_.ended(index, answers_.context);
}

void RequestRun::fail(size_t index) noexcept {
  failed(&given_[index]->error);
  end(index);
}

}  // namespace exportkit
