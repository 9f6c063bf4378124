// exportkit-run: checks a package, loads it without Python, replays its recorded cases, runs inputs, times calls. Runs
// models through the public header only.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <iostream>
#include <sstream>
#include <system_error>

#include "package/json.h"
#include "package/json_text.h"
#include "runtime/run/bench.h"
#include "runtime/run/options.h"
#include "runtime/run/printable.h"

namespace exportkit::run {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kCheckFailed = 1, kHost = 4, kBug = 70;  // EX_SOFTWARE of sysexits.h

// Prints a line of text output.
void say(const std::string& line) { std::cout << printable(line) << "\n"; }

// Prints the document of --json. Nothing in it changes how a terminal shows it.
void say_json(const JsonMembers& document) { std::cout << json_ascii(json_object(document)) << "\n"; }

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// JSON has no infinity.
std::string number(const std::optional<double>& value) {
  if (!value) return "null";
  return std::isfinite(*value) ? json_number(*value) : json_text(std::to_string(*value));
}

std::string text_or_null(const std::string& text) { return text.empty() ? "null" : json_text(text); }

std::string shape_text(const std::vector<int64_t>& shape) {
  return json_list(shape, [](int64_t size) { return std::to_string(size); });
}

std::string shown(const std::map<std::string, int64_t>& sizes) {
  std::string text;
  for (const auto& [dimension, size] : sizes)
    text += (text.empty() ? "" : ", ") + dimension + "=" + std::to_string(size);
  return text;
}

std::string shown(const TensorInfo& tensor) {
  std::string text = tensor.name + ": " + tensor.dtype + "[";
  for (const SizeRange& size : tensor.shape) text += (&size == &tensor.shape.front() ? "" : ", ") + size.text;
  return text + "]";
}

std::string shown(const std::vector<TensorInfo>& tensors) {
  std::string text;
  for (const TensorInfo& tensor : tensors) text += (text.empty() ? "" : ", ") + shown(tensor);
  return text;
}

std::string to_json(const OutputError& error) {
  return json_object({{"rms", number(error.rms)},
                      {"rms_allowed", number(error.rms_allowed)},
                      {"greatest", number(error.greatest)},
                      {"greatest_allowed", number(error.greatest_allowed)}});
}

std::string to_json(const OutputReport& output) {
  return json_object({{"name", json_text(output.name)},
                      {"compared", std::to_string(output.compared)},
                      {"mismatched", std::to_string(output.mismatched)},
                      {"max_abs", number(output.max_abs)},
                      {"max_rel", number(output.max_rel)},
                      {"rtol", number(output.rtol)},
                      {"atol", number(output.atol)},
                      {"error", output.error ? to_json(*output.error) : "null"},
                      {"note", text_or_null(output.note)}});
}

// What `Model::cuda_graphs` says.
struct GraphReport {
  int64_t memory = 0;
  size_t graphs = 0;
  std::vector<std::pair<std::string, std::string>> refused;  // shapes and reason
};

GraphReport read_graph_report(const std::string& text) {
  GraphReport report;
  JsonReader json(text, 8);
  json.object([&](std::string_view key) {
    if (key == "memory") {
      report.memory = json.integer();
    } else if (key == "graphs") {
      json.array([&] {
        json.skip();
        ++report.graphs;
      });
    } else {
      json.array([&] {
        std::vector<std::vector<int64_t>> shapes;
        auto& [shown_shapes, reason] = report.refused.emplace_back();
        json.object([&](std::string_view of) {
          if (of == "reason") {
            reason = json.string();
          } else {
            json.array([&] { json.array([&, &shape = shapes.emplace_back()] { shape.push_back(json.integer()); }); });
          }
        });
        shown_shapes = json_list(shapes, shape_text);
      });
    }
  });
  return report;
}

void print(const OutputReport& output) { say("    " + std::string(output.ok() ? "ok  " : "BAD ") + output.text()); }

// The results, printed at once or collected for one JSON document.
class Run {
 public:
  explicit Run(const Options& options) : options_(options) {}

  int operator()() {
    const auto start = Clock::now();
    Model model = Model::open(options_.package, options_.open);
    describe(model, seconds_since(start));
    if (!options_.weights.empty()) swap(model);
    std::vector<at::Tensor> inputs;
    if (!options_.input.empty()) {
      inputs = run_file(model);
    } else if (options_.weights.empty()) {
      replay(model);
    }
    if (ok_ && options_.bench_seconds > 0) time(model, std::move(inputs));
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
    say("  takes " + shown(model.inputs()));
    say("  gives " + shown(model.outputs()));
  }

  void describe_graphs(const Model& model) {
    const std::string text = model.cuda_graphs();
    document_.emplace_back("cuda_graphs", text);
    if (options_.json) return;
    const GraphReport report = read_graph_report(text);
    say("  " + std::to_string(report.graphs) + " CUDA graphs, whose calls share " +
        std::to_string(report.memory >> 20) + " MiB");
    for (const auto& [shapes, reason] : report.refused) {
      say("  no CUDA graph for inputs of the shapes " + shapes + ": " + reason);
    }
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
      const auto start = Clock::now();
      const CaseReport report = model.replay(i);
      ok_ &= report.ok();
      JsonMembers sizes;
      for (const auto& [dimension, size] : report.sizes) sizes.emplace_back(dimension, std::to_string(size));
      const auto described = [](const OutputReport& output) { return to_json(output); };
      cases.push_back(json_object({{"ok", json_bool(report.ok())},
                                   {"sizes", json_object(sizes)},
                                   {"seconds", number(seconds_since(start))},
                                   {"problem", text_or_null(report.problem)},
                                   {"outputs", json_list(report.outputs, described)}}));
      if (options_.json) continue;
      say("  case " + std::to_string(i) + " (" + shown(report.sizes) + "): " + (report.ok() ? "ok" : "DIFFERS") +
          (report.problem.empty() ? "" : ", " + report.problem));
      for (const OutputReport& output : report.outputs) print(output);
    }
    document_.emplace_back("cases", json_list(cases, [](const std::string& one) { return one; }));
  }

  std::vector<at::Tensor> run_file(const Model& model) {
    std::map<std::string, at::Tensor> given = read_safetensors(options_.input);
    std::vector<at::Tensor> inputs;
    for (const TensorInfo& input : model.inputs()) {
      auto node = given.extract(input.name);
      if (node.empty()) throw Error(errors::kInput, options_.input + " has no `" + input.name + "`");
      inputs.push_back(node.mapped().to(model.device()));
    }
    if (!given.empty()) {
      throw Error(errors::kInput, options_.input + " has `" + given.begin()->first +
                                      "`, which is not an input: the package takes " + shown(model.inputs()));
    }
    const std::vector<at::Tensor> outputs = model.run(inputs);
    std::map<std::string, at::Tensor> named;
    JsonMembers shapes;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::string& name = model.outputs().at(i).name;
      named.emplace(name, outputs[i]);
      shapes.emplace_back(name, shape_text(outputs[i].sizes().vec()));
      if (!options_.json) say("  " + name + ": " + c10::str(outputs[i].sizes()));
    }
    document_.emplace_back("outputs", json_object(shapes));
    if (!options_.output.empty()) write_safetensors(options_.output, named);
    return inputs;
  }

  void time(const Model& model, std::vector<at::Tensor> inputs) {
    if (inputs.empty() && model.case_count() == 0) {
      throw Error(errors::kUsage, "the package has no recorded case to time", "Give inputs with --input.");
    }
    if (inputs.empty()) inputs = model.recorded_case(0).inputs;
    const Timing timing = bench(model, inputs, options_.bench_seconds, options_.threads);
    document_.emplace_back("bench", json_object({{"threads", std::to_string(options_.threads)},
                                                 {"runners", std::to_string(options_.open.runners)},
                                                 {"calls", std::to_string(timing.calls)},
                                                 {"median_ms", number(timing.median_ms)},
                                                 {"p99_ms", number(timing.p99_ms)},
                                                 {"calls_per_second", number(timing.calls_per_second)}}));
    if (options_.json) return;
    char line[128];
    std::snprintf(line, sizeof line, "  %zu calls from %lld thread(s): median %.3f ms, p99 %.3f ms, %.1f calls/s",
                  timing.calls, static_cast<long long>(options_.threads), timing.median_ms, timing.p99_ms,
                  timing.calls_per_second);
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
