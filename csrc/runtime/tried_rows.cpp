// Finds out whether the rows of one request influence another's.
#include <algorithm>
#include <limits>
#include <map>
#include <optional>

#include "package/errors.h"
#include "package/text.h"
#include "runtime/compare.h"
#include "runtime/impl.h"
#include "runtime/joined_steps.h"
#include "runtime/state.h"

namespace exportkit {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr size_t kTriedRequests = 8;                              // that differ
constexpr int64_t kMostTried = 256;                               // requests in one call
constexpr int64_t kMostTriedBytes = int64_t{256} << 20;           // of the inputs of one call that tries several
constexpr int64_t kMostSequences = 32;                            // in one call
constexpr double kAnyValue = std::numeric_limits<double>::max();  // a tolerance that allows all
constexpr size_t kKinds = 4;  // of sequences that differ, among those that are tried together

TriedRows impossible(std::string reason) { return {0, std::move(reason)}; }

// Why `call` fails as the model may, such as without memory; nothing if it does not.
template <class Call>
std::optional<std::string> failure_of(const Call& call) {
  try {
    call();
    return std::nullopt;
  } catch (const Error& error) {
    const std::string_view name = error.name();
    if (name != errors::kModelRun.name && name != errors::kRefusedValue.name) throw;
    return error.message();
  } catch (const c10::Error& error) {
    return first_line(error.what_without_backtrace());
  }
}

// Whether a recorded case calls a method.
bool has_call(const Model& model, size_t place, const std::string& method) {
  return std::ranges::any_of(model.case_calls(place), [&](const auto& call) { return call.first == method; });
}

// The inputs of several requests as those of one call.
Tensors together(const std::vector<const Tensors*>& requests) {
  Tensors all;
  for (size_t place = 0; place < requests.front()->size(); ++place) {
    Tensors parts;
    for (const Tensors* request : requests) parts.push_back((*request)[place].contiguous());
    all.push_back(joined_rows(parts));
  }
  return all;
}

// Rows of floating numbers with the same values in other places; others as they are: an index in another place may be
// out of range there.
Tensors rolled(const Tensors& inputs, int64_t by) {
  Tensors changed;
  for (const at::Tensor& rows : inputs) {
    const bool stays = !rows.is_floating_point() || rows.dim() <= 1 || by == 0;
    changed.push_back(stays ? rows : rows.flatten(1).roll(by, 1).view(rows.sizes()));
  }
  return changed;
}

bool same_bits(const Tensors& one, const Tensors& other) {
  for (size_t i = 0; i < one.size(); ++i) {
    if (one[i].sizes() != other[i].sizes() || !same_content(one[i].cpu(), other[i].cpu())) return false;
  }
  return true;
}

// How outputs differ from those that a call gave alone, beyond their tolerance; empty if they do not.
std::string difference(const Comparison& comparison, const std::string& method, const Tensors& alone,
                       const Tensors& answers) {
  const CallReport report = comparison.compare({method, {}, {}, alone, {}, {}}, answers);
  if (!report.problem.empty()) return report.problem;
  for (const OutputReport& output : report.outputs) {
    if (!output.ok()) return output.text();
  }
  return {};
}

// --- without state ---------------------------------------------------------------------------------------------------

struct Answered {
  Tensors inputs, outputs;
};

class RequestTrial {
 public:
  RequestTrial(const Model& model, const MethodInfo& method, const DimensionRange& rows, int64_t most)
      : model_(model),
        method_(method),
        comparison_(model.impl()->manifest()),
        fewest_(std::max<int64_t>(rows.min, 1)),
        most_(most) {}

  TriedRows operator()() {
    for (const TensorOutput& output : model_.impl()->manifest().methods[index()].call.outputs) {
      if (output.tolerance.atol < kAnyValue) continue;
      return impossible("the values of `" + output.name + "` need not repeat, so its rows cannot be compared");
    }
    for (const std::vector<Tensors>& requests : all_requests()) {
      if (std::string reason = try_requests(requests); !reason.empty()) return impossible(std::move(reason));
    }
    if (shown_) return {most_, {}, bit_equal_};
    return impossible("the recorded cases have no two different rows, which would show that they are independent");
  }

 private:
  size_t index() const { return static_cast<size_t>(&method_ - model_.methods().data()); }

  Tensors call(const Tensors& inputs) const {
    Tensors outputs = model_.run(method_.name, inputs);
    model_.synchronize();
    return outputs;
  }

  // Small requests from the recorded cases: lists of those that fit together. Edge values are for a replay.
  std::vector<std::vector<Tensors>> all_requests() const {
    std::map<std::vector<std::vector<int64_t>>, std::vector<Tensors>> found;  // by the sizes that they have in common
    for (size_t place = 0; place < model_.case_count(); ++place) {
      if (!has_call(model_, place, method_.name)) continue;
      const RecordedCase recorded = model_.recorded_case(place);
      for (const RecordedCall& call : recorded.calls) {
        if (call.method != method_.name || !recorded.edge_case.empty()) continue;
        std::vector<std::vector<int64_t>> sizes;
        for (const at::Tensor& input : call.inputs) sizes.push_back(input.sizes().slice(1).vec());
        for (int64_t start = 0; start + fewest_ <= call.inputs.front().size(0); start += fewest_) {
          Tensors& piece = found[sizes].emplace_back();
          for (const at::Tensor& input : call.inputs) piece.push_back(input.narrow(0, start, fewest_).contiguous());
        }
      }
    }
    std::vector<std::vector<Tensors>> all;
    for (auto& [sizes, pieces] : found) all.push_back(different(std::move(pieces)));
    return all;
  }

  static std::vector<Tensors> different(std::vector<Tensors> pieces) {
    const size_t given = pieces.size();
    if (given > kTriedRequests) pieces.resize(kTriedRequests);
    for (size_t n = 0; given > 0 && given + n < kTriedRequests; ++n) {
      pieces.push_back(rolled(pieces[n % given], static_cast<int64_t>(n) + 1));
    }
    return pieces;
  }

  // Those that the model can answer: rolled rows may make no sense to it.
  std::vector<Answered> answered(const std::vector<Tensors>& requests) const {
    std::vector<Answered> answers;
    for (const Tensors& inputs : requests) {
      Tensors outputs;
      if (!failure_of([&] { outputs = call(inputs); })) answers.push_back({inputs, std::move(outputs)});
    }
    return answers;
  }

  // How many requests to call together: 2, 4, 8, and so on, and as many as a call holds.
  std::vector<int64_t> counts(const std::vector<Answered>& answers) const {
    int64_t bytes = 0;
    for (const at::Tensor& input : answers.front().inputs) bytes += static_cast<int64_t>(input.nbytes());
    const int64_t fitting = std::max<int64_t>(2, kMostTriedBytes / std::max<int64_t>(bytes, 1));
    const int64_t most = std::min({most_ / fewest_, kMostTried, fitting});
    std::vector<int64_t> all;
    for (int64_t count = 2; count < most; count *= 2) all.push_back(count);
    all.push_back(most);
    return all;
  }

  // Why requests cannot run together; empty if these show no reason.
  std::string try_requests(const std::vector<Tensors>& requests) {
    const std::vector<Answered> answers = answered(requests);
    const auto differs = [&](const Answered& other) { return !same_bits(answers.front().inputs, other.inputs); };
    if (std::none_of(answers.begin(), answers.end(), differs)) return {};
    for (size_t i = 0; i < method_.outputs.size(); ++i) {
      for (const Answered& other : answers) {
        if (other.outputs[i].sizes().slice(1) == answers.front().outputs[i].sizes().slice(1)) continue;
        return "the sizes of `" + method_.outputs[i].name + "` depend on the values of inputs";
      }
    }
    for (const int64_t count : counts(answers)) {
      std::vector<const Tensors*> inputs, alone;
      for (size_t n = 0; n < static_cast<size_t>(count); ++n) {  // the first, then from the last on
        const Answered& chosen = answers[(answers.size() - n % answers.size()) % answers.size()];
        inputs.push_back(&chosen.inputs), alone.push_back(&chosen.outputs);
      }
      Tensors outputs;
      if (const auto failure = failure_of([&] { outputs = call(together(inputs)); })) {
        if (count == 2) return "the model fails on two requests together: " + *failure;
        most_ = count / 2 * fewest_;  // perhaps there is no memory for so many
        return {};
      }
      const Tensors expected = together(alone);
      const std::string differ = difference(comparison_, method_.name, expected, outputs);
      if (!differ.empty()) return "rows influence one another: " + differ;
      shown_ = true;
      bit_equal_ = bit_equal_ && same_bits(expected, outputs);
    }
    return {};
  }

  const Model& model_;
  const MethodInfo& method_;
  const Comparison comparison_;
  const int64_t fewest_;
  int64_t most_;
  bool shown_ = false, bit_equal_ = true;
};

// --- with state ------------------------------------------------------------------------------------------------------

class SequenceTrial {
 public:
  SequenceTrial(const Model& model, const MethodInfo& method, RecordedCase recorded, int64_t most)
      : model_(model),
        method_(method),
        recorded_(std::move(recorded)),
        comparison_(model.impl()->manifest()),
        sizes_(session_sizes(model, recorded_)),
        most_(most) {}

  TriedRows operator()() {
    const int64_t rows = sizes_.at(method_.dimensions[method_.row_dimension.value()].name);
    for (size_t number = 0; number < kKinds; ++number) {
      Sequence& kind = kinds_.emplace_back();
      for (const RecordedCall& call : recorded_.calls)
        kind.push_back(rolled(call.inputs, static_cast<int64_t>(number)));
    }
    std::vector<Played> alone;
    const auto play_alone = [&] {
      for (size_t number = 0; number < kKinds; ++number) alone.push_back(play({number}).front());
    };
    if (const auto failure = failure_of(play_alone)) {  // rolled rows may make no sense to it
      return impossible("the model fails on changed inputs of the recorded sequence: " + *failure);
    }
    if (same_results(alone[0], alone[1])) {
      return impossible("other inputs do not change the answers of the recorded sequence");
    }
    bool shown = false, bit_equal = true;
    for (int64_t count = 2; count * rows <= most_ && count <= kMostSequences; count *= 2) {
      std::vector<size_t> chosen;
      for (size_t n = 0; n < static_cast<size_t>(count); ++n) chosen.push_back(n % kKinds);
      std::vector<Played> played;
      if (const auto failure = failure_of([&] { played = play(chosen); })) {
        if (count == 2) return impossible("the model fails on two sequences together: " + *failure);
        most_ = count / 2 * rows;  // perhaps there is no memory for so many
        break;
      }
      for (size_t n = 0; n < chosen.size(); ++n) {
        const std::string differ = difference_of(alone[chosen[n]], played[n]);
        if (!differ.empty()) return impossible("sequences influence one another: " + differ);
        bit_equal = bit_equal && same_results(alone[chosen[n]], played[n]);
      }
      shown = true;
    }
    if (shown) return {most_, {}, bit_equal};
    return impossible("a batch has at most " + std::to_string(most_) + " rows, which leaves no room for two sequences");
  }

 private:
  using Sequence = std::vector<Tensors>;  // the inputs of each call
  struct Played {
    std::vector<Tensors> outputs;  // of each call
    Tensors state;                 // after the last one
  };

  // Plays sequences of these kinds in turns, the steps of the method together.
  std::vector<Played> play(const std::vector<size_t>& kinds) const {
    std::vector<Session> sessions;
    for (size_t n = 0; n < kinds.size(); ++n) sessions.push_back(model_.session(sizes_));
    std::vector<Played> played(kinds.size());
    for (size_t place = 0; place < recorded_.calls.size(); ++place) {
      const std::string& called = recorded_.calls[place].method;
      if (kinds.size() > 1 && called == method_.name) {
        step(kinds, place, sessions, played);
        continue;
      }
      for (size_t n = 0; n < kinds.size(); ++n) {
        played[n].outputs.push_back(copies_of(sessions[n].run(called, kinds_[kinds[n]][place])));
      }
    }
    for (size_t n = 0; n < kinds.size(); ++n) {
      sessions[n].synchronize();
      for (const auto& [name, tensor] : sessions[n].state()) played[n].state.push_back(tensor);
    }
    return played;
  }

  void step(const std::vector<size_t>& kinds, size_t place, const std::vector<Session>& sessions,
            std::vector<Played>& played) const {
    std::vector<const Tensors*> inputs;
    std::vector<Session::Impl*> members;
    std::vector<std::unique_ptr<Turn>> turns;
    for (size_t n = 0; n < kinds.size(); ++n) {
      inputs.push_back(&kinds_[kinds[n]][place]);
      members.push_back(sessions[n].impl().get());
      turns.push_back(std::make_unique<Turn>(*members.back()));
    }
    Workspace workspace;
    const auto index = static_cast<size_t>(&method_ - model_.methods().data());
    const Tensors outputs = run_joined(*model_.impl(), index, members, together(inputs), workspace);
    int64_t row = 0;
    for (size_t n = 0; n < kinds.size(); ++n) {
      const int64_t rows = inputs[n]->front().size(0);
      Tensors& own = played[n].outputs.emplace_back();
      for (const at::Tensor& output : outputs) own.push_back(output.narrow(0, row, rows).clone());
      row += rows;
    }
  }

  static bool same_results(const Played& one, const Played& other) {
    for (size_t i = 0; i < one.outputs.size(); ++i) {
      if (!same_bits(one.outputs[i], other.outputs[i])) return false;
    }
    return same_bits(one.state, other.state);
  }

  std::string difference_of(const Played& alone, const Played& played) const {
    for (size_t i = 0; i < recorded_.calls.size(); ++i) {
      std::string found = difference(comparison_, recorded_.calls[i].method, alone.outputs[i], played.outputs[i]);
      if (!found.empty()) return found;
    }
    RecordedCase wanted;
    std::vector<std::pair<std::string, at::Tensor>> given;
    for (size_t i = 0; i < alone.state.size(); ++i) {
      wanted.state.emplace(model_.state()[i].name, alone.state[i]);
      given.emplace_back(model_.state()[i].name, played.state[i]);
    }
    for (const OutputReport& report : comparison_.compare_state(wanted, given)) {
      if (!report.ok()) return report.text();
    }
    return {};
  }

  const Model& model_;
  const MethodInfo& method_;
  const RecordedCase recorded_;
  const Comparison comparison_;
  const Sizes sizes_;
  int64_t most_;
  std::vector<Sequence> kinds_;
};

}  // namespace

TriedRows try_rows(const Model& model, const MethodInfo& method, int64_t most) {
  for (const TensorInfo& input : method.inputs) {
    if (input.written)
      return impossible("writes into its input `" + input.name + "`, which a request does not get back");
  }
  if (!method.row_dimension) return impossible(method.row_reason);
  const DimensionRange& rows = method.dimensions[*method.row_dimension];
  most = std::min(most, rows.max);
  if (most / 2 < std::max<int64_t>(rows.min, 1)) {
    return impossible("batches have at most " + std::to_string(most) + " rows, which leaves no room for two requests");
  }
  if (!method.stateful) return RequestTrial(model, method, rows, most)();
  for (size_t place = 0; place < model.case_count(); ++place) {
    if (!has_call(model, place, method.name)) continue;
    return SequenceTrial(model, method, model.recorded_case(place), most)();
  }
  return impossible("no recorded sequence shows whether those that run together influence one another");
}

}  // namespace exportkit
