// Runs several requests of a caller of the C interface, together where they fit together.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "exportkit/exportkit.h"
#include "runtime/c_api_calls.h"
#include "runtime/request_inputs.h"
#include "runtime/session_impl.h"

namespace exportkit {

class RequestRun {
 public:
  // The structures `requests` and `answers` were checked, and the method writes into no input.
  RequestRun(OpenModel& open, exportkit_model handle, const MethodInfo& method,
             std::span<exportkit_request* const> requests, const exportkit_answers& answers);

  // Runs and ends all. A call of several has at most `most` rows. If this throws, no request was run or has an error.
  void operator()(int64_t most);

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

  static Session::Impl* session_of(const Request& request);
  Request checked(size_t index) const;
  std::vector<Request> all_checked() const;
  static std::vector<Group> groups(const std::vector<Request>& requests, int64_t most);

  void run_group(const Group& group) noexcept;
  bool ran(std::span<Member> members);
  Tensors outputs_of(std::span<const Member> members, Workspace& workspace) const;

  void wait_after_failure() const noexcept;
  void answer(std::span<Member> members, Tensors outputs, const Workspace& workspace);
  void end(size_t index) noexcept;
  // Ends a request with the exception that is being handled.
  void fail(size_t index) noexcept;

  OpenModel& open_;
  const exportkit_model handle_;
  const Model::Impl& model_;
  const MethodInfo& info_;
  const size_t method_;
  const std::span<exportkit_request* const> given_;
  const exportkit_answers& answers_;
  std::vector<bool> ended_;
};

}  // namespace exportkit
