// exportkit-run: checks a package, loads it without Python, replays its recorded cases, runs inputs, times calls. Runs
// models through the public header only.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <mutex>
#include <numeric>
#include <optional>
#include <sstream>
#include <system_error>
#include <thread>

#include "package/json_fields.h"
#include "package/text.h"
#include "runtime/run/parts.h"

namespace exportkit::run {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCheckFailed = 1, kHost = 4, kBug = 70;  // EX_SOFTWARE of sysexits.h

// Prints a line of text output.
void say(const std::string& line) { std::cout << printable(line) << "\n"; }

// Prints the document of --json. Nothing in it changes how a terminal shows it.
void say_json(const JsonMembers& document) { std::cout << json_ascii(json_object(document)) << "\n"; }

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// What `Model::cuda_graphs` says.
struct GraphReport {
  int64_t memory = 0, graphs = 0;
  std::vector<std::pair<std::string, std::string>> refused;  // shapes in JSON, and the reason
};

GraphReport read_graph_report(const std::string& said) {
  GraphReport report;
  JsonReader json(said, 8);
  const auto read_refused = [&] {
    auto& [shapes, reason] = report.refused.emplace_back();
    read_members(json, {{"shapes", [&] { shapes = json.skipped(); }}, {"reason", [&] { reason = json.string(); }}});
  };
  read_members(json, {{"memory", [&] { report.memory = json.integer(); }},
                      {"graphs", [&] { json.array([&] { json.skip(), ++report.graphs; }); }},
                      {"refused", [&] { json.array(read_refused); }}});
  return report;
}

void print(const std::vector<OutputReport>& outputs, const std::string& indent) {
  for (const OutputReport& output : outputs) say(indent + (output.ok() ? "ok  " : "BAD ") + output.text());
}

std::string verdict(bool ok) { return ok ? "ok" : "DIFFERS"; }

// Prints a case of one call in one line, and of several in one line each.
void print(size_t index, const CaseReport& report, size_t calls) {
  std::string title = "  case " + std::to_string(index);
  const std::string edge_case = report.edge_case.empty() ? "" : "; " + report.edge_case;
  if (calls > 1)
    say(title + ": " + std::to_string(calls) + " calls in one session" + edge_case + ": " + verdict(report.ok()));
  const std::string indent = calls > 1 ? "      " : "    ";
  for (const CallReport& call : report.calls) {
    if (calls > 1) title = "    " + call.method;
    const std::string method = calls > 1 || call.method == "forward" ? "" : call.method + "; ";
    say(title + " (" + method + shown(call.sizes) + (calls > 1 ? "" : edge_case) + "): " + verdict(call.ok()) +
        (call.problem.empty() ? "" : ", " + call.problem));
    print(call.outputs, indent);
  }
  if (report.state.empty()) return;
  say("    state after the last call");
  print(report.state, "      ");
}

// --- timing ----------------------------------------------------------------------------------------------------------

struct TimedCall {
  Model model;
  std::string method;
  std::vector<at::Tensor> inputs;
  std::optional<Session> session;  // each call runs on a copy of it
};

struct Timing {
  size_t calls;
  double median_ms, p99_ms, calls_per_second;
};

// Inputs for one call: what it writes belongs to this thread.
std::vector<at::Tensor> own_inputs(const TimedCall& call) {
  std::vector<at::Tensor> inputs = call.inputs;
  const std::vector<TensorInfo>& described = call.model.method(call.method).inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (described[i].written) inputs[i] = inputs[i].clone();
  }
  return inputs;
}

// Runs the call once and returns its time in milliseconds.
double time_once(const TimedCall& call, std::mutex& forking) {
  std::optional<Session> session;
  if (call.session) {
    const std::lock_guard one_at_a_time(forking);
    session = call.session->fork();
  }
  const std::vector<at::Tensor> inputs = own_inputs(call);
  if (session) call.model.synchronize();
  const auto start = Clock::now();
  const std::vector<at::Tensor> outputs =
      session ? session->run(call.method, inputs) : call.model.run(call.method, inputs);
  call.model.synchronize();
  return 1e3 * seconds_since(start);
}

// Times calls from several threads. A call's time ends when its outputs are computed, on CUDA too; the copy of a
// session and of inputs that are written is not in it. Rethrows a call's exception.
Timing bench(const TimedCall& call, double seconds, int64_t threads) {
  constexpr int kWarmUp = 5;
  std::mutex forking;
  for (int i = 0; i < kWarmUp; ++i) time_once(call, forking);
  std::vector<std::vector<double>> times(static_cast<size_t>(threads));
  std::vector<std::exception_ptr> failures(times.size());
  std::vector<std::thread> workers;
  const auto start = Clock::now();
  const auto end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (size_t i = 0; i < times.size(); ++i) {
    workers.emplace_back([&, i] {
      try {
        while (Clock::now() < end || times[i].empty()) times[i].push_back(time_once(call, forking));
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  std::vector<double> all;
  double calls_per_second = 0;  // of all threads, without the time between calls
  for (const auto& each : times) {
    all.insert(all.end(), each.begin(), each.end());
    const double spent = std::accumulate(each.begin(), each.end(), 0.0);
    calls_per_second += static_cast<double>(each.size()) / spent * 1e3;
  }
  std::sort(all.begin(), all.end());
  const auto at = [&](double share) { return all[static_cast<size_t>(share * static_cast<double>(all.size() - 1))]; };
  return {all.size(), at(0.5), at(0.99), calls_per_second};
}

// The results, printed at once or collected for one JSON document.
class Run {
 public:
  explicit Run(const Options& options) : options_(options) {}

  int operator()() {
    const auto start = Clock::now();
    Model model = Model::open(options_.package, options_.open);
    describe(model, seconds_since(start));
    if (!options_.method.empty()) model.method(options_.method);  // UsageError if there is none
    if (!options_.weights.empty()) swap(model);
    std::optional<TimedCall> call;
    if (!options_.input.empty()) {
      call = run_file(model);
    } else if (options_.weights.empty()) {
      replay(model);
    }
    if (ok_ && options_.bench_seconds > 0) time(call ? *call : recorded_call(model));
    if (options_.open.cuda_graphs != CudaGraphs::kNone) describe_graphs(model);
    document_.front().second = json_bool(ok_);
    if (options_.json) say_json(document_);
    return ok_ ? 0 : kCheckFailed;
  }

 private:
  void describe(const Model& model, double seconds) {
    document_ = {{"ok", "false"},
                 {"package", json_object({{"name", json_text(model.name())}, {"version", json_text(model.version())}})},
                 {"target", json_text(model.target())},
                 {"device", json_text(model.device().str())},
                 {"torch", json_text(torch_version())},
                 {"seconds", number(seconds)}};
    if (options_.json) return;
    say(model.name() + " " + model.version() + ", target " + model.target() + " on " + model.device().str() +
        ", torch " + torch_version() + ": loaded in " + std::to_string(static_cast<int>(seconds * 1e3)) + " ms");
    if (model.methods().size() == 1) {
      say("  takes " + shown(model.inputs()));
      say("  gives " + shown(model.outputs()));
    } else {
      for (const MethodInfo& method : model.methods()) {
        say("  " + method.name + (method.stateful ? " takes, in a session, " : " takes ") + shown(method.inputs));
        say("    and gives " + shown(method.outputs));
      }
    }
    if (!model.state().empty()) say("  remembers " + shown(model.state()));
  }

  void describe_graphs(const Model& model) {
    JsonMembers methods;
    for (const MethodInfo& method : model.methods()) {
      const std::string text = model.cuda_graphs(method.name);
      methods.emplace_back(method.name, text);
      if (options_.json) continue;
      const GraphReport report = read_graph_report(text);
      say("  " + (model.methods().size() > 1 ? method.name + ": " : "") + std::to_string(report.graphs) +
          " CUDA graphs, whose calls share " + std::to_string(report.memory >> 20) + " MiB");
      for (const auto& [shapes, reason] : report.refused) {
        say("  no CUDA graph for inputs of the shapes " + shapes + ": " + reason);
      }
    }
    document_.emplace_back("cuda_graphs", json_object(methods));
  }

  void swap(Model& model) {
    const auto start = Clock::now();
    model.swap_weights(options_.weights);
    document_.emplace_back(
        "weights", json_object({{"file", json_text(options_.weights)}, {"seconds", number(seconds_since(start))}}));
    if (options_.json) return;
    say("  runs with the weights of " + options_.weights +
        "; the recorded cases belong to the package's weights and are not replayed");
  }

  void replay(const Model& model) {
    std::vector<std::string> cases;
    if (model.case_count() == 0 && !options_.json) say("  no recorded case to compare");
    for (size_t i = 0; i < model.case_count(); ++i) {
      const size_t calls = model.case_calls(i).size();
      if (!has_call(model, i)) continue;
      const auto start = Clock::now();
      const CaseReport report = model.replay(i);
      ok_ &= report.ok();
      cases.push_back(json_object(
          {{"ok", json_bool(report.ok())},
           {"edge_case", json_text(report.edge_case)},
           {"seconds", number(seconds_since(start))},
           {"calls", json_list(report.calls, [](const CallReport& call) { return to_json(call); })},
           {"state", json_list(report.state, [](const OutputReport& tensor) { return to_json(tensor); })}}));
      if (!options_.json) print(i, report, calls);
    }
    document_.emplace_back("cases", json_list(cases, [](const std::string& one) { return one; }));
  }

  // Whether a recorded case calls the method of --method; any case does without it.
  bool has_call(const Model& model, size_t index) const {
    const auto calls = model.case_calls(index);
    return options_.method.empty() ||
           std::ranges::any_of(calls, [&](const auto& call) { return call.first == options_.method; });
  }

  TimedCall run_file(const Model& model) {
    const MethodInfo& method = options_.method.empty() ? model.default_method() : model.method(options_.method);
    std::map<std::string, at::Tensor> given = read_safetensors(options_.input);
    std::vector<at::Tensor> inputs;
    for (const TensorInfo& input : method.inputs) {
      auto node = given.extract(input.name);
      if (node.empty()) throw Error(errors::kInput, options_.input + " has no `" + input.name + "`");
      inputs.push_back(node.mapped().to(model.device()));
    }
    if (!given.empty()) {
      throw Error(errors::kInput, options_.input + " has `" + given.begin()->first +
                                      "`, which is not an input: the package takes " + shown(method.inputs));
    }
    TimedCall call{model, method.name, std::move(inputs), {}};
    if (method.stateful) call.session = model.session(options_.session_sizes);
    show_outputs(method, call);
    return call;
  }

  // Runs the call, in a copy of its session, and prints and writes what it gives.
  void show_outputs(const MethodInfo& method, const TimedCall& call) {
    const std::vector<at::Tensor> outputs =
        call.session ? call.session->fork().run(method.name, call.inputs) : call.model.run(method.name, call.inputs);
    std::map<std::string, at::Tensor> named;
    for (size_t i = 0; i < outputs.size(); ++i) named.emplace(method.outputs.at(i).name, outputs[i]);
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      if (method.inputs[i].written) named.emplace("written." + method.inputs[i].name, call.inputs[i]);
    }
    JsonMembers shapes;
    for (const auto& [name, tensor] : named) {
      shapes.emplace_back(name, json_list(tensor.sizes(), [](int64_t size) { return std::to_string(size); }));
      if (!options_.json) say("  " + name + ": " + c10::str(tensor.sizes()));
    }
    document_.emplace_back("outputs", json_object(shapes));
    if (!options_.output.empty()) write_safetensors(options_.output, named);
  }

  // The first recorded call of the method, after the calls before it in its session.
  TimedCall recorded_call(const Model& model) const {
    for (size_t i = 0; i < model.case_count(); ++i) {
      if (!has_call(model, i)) continue;
      const RecordedCase recorded = model.recorded_case(i);
      std::optional<Session> session;
      for (const RecordedCall& call : recorded.calls) {
        const bool stateful = model.method(call.method).stateful;
        if (stateful && !session) session = model.session(state_sizes(model, call));
        if (options_.method.empty() || call.method == options_.method) {
          return {model, call.method, call.inputs, stateful ? session : std::nullopt};
        }
        if (stateful) session->run(call.method, call.inputs);
      }
    }
    throw Error(errors::kUsage,
                options_.method.empty() ? "the package has no recorded case to time"
                                        : "the package has no recorded call of " + model.method(options_.method).name,
                "Give inputs with --input.");
  }

  // The sizes of a session for a recorded call.
  static std::map<std::string, int64_t> state_sizes(const Model& model, const RecordedCall& call) {
    std::map<std::string, int64_t> sizes;
    for (const DimensionRange& dimension : model.state_dimensions()) {
      const auto size = call.sizes.find(dimension.name);
      sizes.emplace(dimension.name, size == call.sizes.end() ? dimension.min : size->second);
    }
    return sizes;
  }

  static std::string duration(double milliseconds) {
    char text[32];
    const bool small = milliseconds < 0.1;
    std::snprintf(text, sizeof text, small ? "%.1f us" : "%.3f ms", small ? milliseconds * 1e3 : milliseconds);
    return text;
  }

  void time(const TimedCall& call) {
    const Timing timing = bench(call, options_.bench_seconds, options_.threads);
    document_.emplace_back("bench", json_object({{"method", json_text(call.method)},
                                                 {"threads", std::to_string(options_.threads)},
                                                 {"calls", std::to_string(timing.calls)},
                                                 {"median_ms", number(timing.median_ms)},
                                                 {"p99_ms", number(timing.p99_ms)},
                                                 {"calls_per_second", number(timing.calls_per_second)}}));
    if (options_.json) return;
    char line[128];
    std::snprintf(line, sizeof line, "  %zu calls from %lld thread(s): median %s, p99 %s, %.0f calls/s", timing.calls,
                  static_cast<long long>(options_.threads), duration(timing.median_ms).c_str(),
                  duration(timing.p99_ms).c_str(), timing.calls_per_second);
    say(line);
  }

  const Options& options_;
  JsonMembers document_;
  bool ok_ = true;
};

int fail(bool json, const char* kind, const std::string& message, const std::string& hint, int exit_code) {
  if (json) {
    say_json({{"error", json_object({{"kind", json_text(kind)},
                                     {"message", json_text(message)},
                                     {"hint", text_or_null(hint)},
                                     {"exit_code", std::to_string(exit_code)}})}});
  }
  std::istringstream lines("error: " + message + (hint.empty() ? "" : "\n" + hint));
  int number = 0;
  for (std::string line; std::getline(lines, line); ++number) {
    // Quoted text must not start a line that looks like ours.
    std::cerr << (number == 0 || line.starts_with(' ') ? "" : "  ") << printable(line) << "\n";
  }
  return exit_code;
}

int main(int argc, char** argv) {
  const bool json = std::find(argv, argv + argc, std::string("--json")) != argv + argc;
  try {
    Options options = parse(argc, argv);
    options.open.warn = [](const std::string& warning) { std::cerr << "warning: " << printable(warning) << "\n"; };
    if (options.help) {
      std::cout << kHelp;
      return 0;
    }
    return Run(options)();
  } catch (const Error& error) {
    return fail(json, error.name(), error.message(), error.hint(), error.exit_code());
  } catch (const std::system_error& error) {
    return fail(json, "OSError", error.what(), "The operating system reported this error.", kHost);
  } catch (const std::exception& error) {
    return fail(json, "InternalError", error.what(), "This is a bug in exportkit. Please report it.", kBug);
  }
}

}  // namespace
}  // namespace exportkit::run

int main(int argc, char** argv) { return exportkit::run::main(argc, argv); }
