// exportkit-run: checks a package, loads it without Python, replays its recorded cases, runs inputs, times calls. Uses
// only the public header.
#include <chrono>
#include <cstdio>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>

#include "runtime/run/bench.h"
#include "runtime/run/options.h"
#include "runtime/run/printable.h"

namespace exportkit::run {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int kCheckFailed = 1, kHost = 4, kBug = 70;  // EX_SOFTWARE of sysexits.h

// Prints a line of text output.
void say(const std::string& line) { std::cout << printable(line) << "\n"; }

// Prints the document of --json. Replaces invalid UTF-8 and escapes characters that are not ASCII.
void say_json(const Json& document) {
  std::cout << document.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) << "\n";
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// JSON has no infinity.
Json number(const std::optional<double>& value) {
  if (!value) return nullptr;
  return std::isfinite(*value) ? Json(*value) : Json(std::to_string(*value));
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

Json to_json(const OutputError& error) {
  return {{"rms", number(error.rms)},
          {"rms_allowed", number(error.rms_allowed)},
          {"greatest", number(error.greatest)},
          {"greatest_allowed", number(error.greatest_allowed)}};
}

Json to_json(const OutputReport& output) {
  return {{"name", output.name},
          {"compared", output.compared},
          {"mismatched", output.mismatched},
          {"max_abs", number(output.max_abs)},
          {"max_rel", number(output.max_rel)},
          {"rtol", output.rtol},
          {"atol", output.atol},
          {"error", output.error ? to_json(*output.error) : Json()},
          {"note", output.note.empty() ? Json() : Json(output.note)}};
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
    document_["ok"] = ok_;
    if (options_.json) say_json(document_);
    return ok_ ? 0 : kCheckFailed;
  }

 private:
  void describe(const Model& model, double seconds) {
    document_ = {{"ok", false},
                 {"package", {{"name", model.name()}, {"version", model.version()}}},
                 {"target", model.target()},
                 {"device", model.device().str()},
                 {"torch", torch_version()},
                 {"seconds", seconds}};
    if (options_.json) return;
    say(model.name() + " " + model.version() + ", target " + model.target() + " on " + model.device().str() +
        ", torch " + torch_version() + ": loaded in " + std::to_string(static_cast<int>(seconds * 1e3)) + " ms");
    say("  takes " + shown(model.inputs()));
    say("  gives " + shown(model.outputs()));
  }

  void describe_graphs(const Model& model) {
    const Json report = Json::parse(model.cuda_graphs());
    document_["cuda_graphs"] = report;
    if (options_.json) return;
    say("  " + std::to_string(report["graphs"].size()) + " CUDA graphs, whose calls share " +
        std::to_string(report["memory"].get<int64_t>() >> 20) + " MiB");
    for (const Json& refused : report["refused"]) {
      say("  no CUDA graph for inputs of the shapes " + refused["shapes"].dump() + ": " +
          refused["reason"].get<std::string>());
    }
  }

  void swap(Model& model) {
    const auto start = Clock::now();
    model.swap_weights(options_.weights);
    document_["weights"] = {{"file", options_.weights}, {"seconds", seconds_since(start)}};
    if (options_.json) return;
    say("  runs with the weights of " + options_.weights +
        "; the recorded cases belong to the package's weights and are not replayed");
  }

  void replay(const Model& model) {
    document_["cases"] = Json::array();
    if (model.case_count() == 0 && !options_.json) say("  no recorded case to compare");
    for (size_t i = 0; i < model.case_count(); ++i) {
      const auto start = Clock::now();
      const CaseReport report = model.replay(i);
      ok_ &= report.ok();
      Json outputs = Json::array();
      for (const OutputReport& output : report.outputs) outputs.push_back(to_json(output));
      document_["cases"].push_back({{"ok", report.ok()},
                                    {"sizes", report.sizes},
                                    {"seconds", seconds_since(start)},
                                    {"problem", report.problem.empty() ? Json() : Json(report.problem)},
                                    {"outputs", outputs}});
      if (options_.json) continue;
      say("  case " + std::to_string(i) + " (" + shown(report.sizes) + "): " + (report.ok() ? "ok" : "DIFFERS") +
          (report.problem.empty() ? "" : ", " + report.problem));
      for (const OutputReport& output : report.outputs) print(output);
    }
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
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::string& name = model.outputs().at(i).name;
      named.emplace(name, outputs[i]);
      document_["outputs"][name] = outputs[i].sizes().vec();
      if (!options_.json) say("  " + name + ": " + c10::str(outputs[i].sizes()));
    }
    if (!options_.output.empty()) write_safetensors(options_.output, named);
    return inputs;
  }

  void time(const Model& model, std::vector<at::Tensor> inputs) {
    if (inputs.empty() && model.case_count() == 0) {
      throw Error(errors::kUsage, "the package has no recorded case to time", "Give inputs with --input.");
    }
    if (inputs.empty()) inputs = model.recorded_case(0).inputs;
    const Timing timing = bench(model, inputs, options_.bench_seconds, options_.threads);
    document_["bench"] = {{"threads", options_.threads}, {"runners", options_.open.runners},
                          {"calls", timing.calls},       {"median_ms", timing.median_ms},
                          {"p99_ms", timing.p99_ms},     {"calls_per_second", timing.calls_per_second}};
    if (options_.json) return;
    char line[128];
    std::snprintf(line, sizeof line, "  %zu calls from %lld thread(s): median %.3f ms, p99 %.3f ms, %.1f calls/s",
                  timing.calls, static_cast<long long>(options_.threads), timing.median_ms, timing.p99_ms,
                  timing.calls_per_second);
    say(line);
  }

  const Options& options_;
  Json document_;
  bool ok_ = true;
};

int fail(bool json, const char* kind, const std::string& message, const std::string& hint, int exit_code) {
  if (json) {
    const Json error = {
        {"kind", kind}, {"message", message}, {"hint", hint.empty() ? Json() : Json(hint)}, {"exit_code", exit_code}};
    say_json(Json{{"error", error}});
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
