#include <getopt.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <functional>

#include "runtime/run/parts.h"

namespace exportkit::run {

const char* const kHelp = R"(Usage: exportkit-run PACKAGE [OPTIONS]

Checks a package, loads it without Python, and replays its recorded cases.

Options:
  --device DEVICE      auto, cpu, cuda or cuda:<index>  [auto]
  --target NAME        The target to run  [the best one that runs here]
  --public-key PEM     A PEM file or PEM text. The package must be signed by one of the given keys. Repeatable.
  --signature FILE     The signature file  [PACKAGE.sig, or PACKAGE.sigstore.json for a key on an elliptic curve]
  --verify HOW         once: hash only what is new or may have changed; always: hash everything  [once]
  --method NAME        The method of --input and --bench, and the only one whose recorded cases are replayed
                       [forward, or the only method]
  --input FILE         A safetensors file with inputs by name. Runs them instead of the recorded cases.
  --output FILE        A safetensors file for the outputs of --input.
  --session SIZE=N     A size of the session that --input runs in, such as batch=3, if the method has state. Repeatable.
  --weights FILE       A safetensors file with the model's whole state. Runs with these weights, not the package's. Does
                       not replay the recorded cases, which belong to the package's weights.
  --bench SECONDS      Times calls with the inputs of --input, or of the first recorded case. With state, each call runs
                       on a copy of the session.
  --threads N          The number of threads that call the model  [1]
  --cuda-graphs        Run calls on a GPU as CUDA graphs: one launch each. Launches of several threads take turns.
  --json               Print only one JSON document on stdout.
  -h, --help           Show this message and exit.

Exit codes: 0 success; 1 a check failed; 2 wrong usage; 3 the package is bad, tampered with or not trusted; 4 this
machine cannot do it.
)";

namespace {

[[noreturn]] void usage(const std::string& message) {
  throw Error(errors::kUsage, message, "See `exportkit-run --help`.");
}

int64_t whole_number(const std::string& option, const char* text) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*text == '\0' || *end != '\0' || value < 1 || value > 1024) {
    usage(option + " must be an integer from 1 to 1024, got '" + text + "'");
  }
  return value;
}

// Adds NAME=N of --session.
void add_size(const std::string& text, std::map<std::string, int64_t>& sizes) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0)
    usage("--session must be SIZE=N, such as batch=3, got '" + text + "'");
  char* end = nullptr;
  const char* const digits = text.c_str() + equals + 1;
  errno = 0;
  const long long number = std::strtoll(digits, &end, 10);
  if (*digits == '\0' || *end != '\0' || errno != 0)
    usage("--session must be SIZE=N with an integer, got '" + text + "'");
  if (!sizes.emplace(text.substr(0, equals), number).second)
    usage("--session gives " + text.substr(0, equals) + " twice");
}

double seconds(const char* text) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (*text == '\0' || *end != '\0' || !std::isfinite(value) || value <= 0) {
    usage(std::string("--bench must be a number of seconds above 0, got '") + text + "'");
  }
  return value;
}

Verify verify(const std::string& text) {
  if (text != "once" && text != "always") usage("--verify must be once or always, got '" + text + "'");
  return text == "once" ? Verify::kOnce : Verify::kAlways;
}

}  // namespace

Options parse(int argc, char** argv) {
  Options options;
  struct Known {
    const char* name;
    bool takes_value;
    std::function<void(const char*)> take;
  };
  const auto text = [](std::string& into) { return [&into](const char* value) { into = value; }; };
  const Known known[] = {
      {"device", true, text(options.open.device)},
      {"target", true, [&](const char* value) { options.open.target = value; }},
      {"public-key", true, [&](const char* value) { options.open.public_keys.emplace_back(value); }},
      {"signature", true, text(options.open.signature)},
      {"verify", true, [&](const char* value) { options.open.verify = verify(value); }},
      {"method", true, text(options.method)},
      {"session", true, [&](const char* value) { add_size(value, options.session_sizes); }},
      {"input", true, text(options.input)},
      {"output", true, text(options.output)},
      {"weights", true, text(options.weights)},
      {"bench", true, [&](const char* value) { options.bench_seconds = seconds(value); }},
      {"threads", true, [&](const char* value) { options.threads = whole_number("--threads", value); }},
      {"cuda-graphs", false, [&](const char*) { options.open.cuda_graphs = CudaGraphs::kOnFirstUse; }},
      {"json", false, [&](const char*) { options.json = true; }},
      {"help", false, [&](const char*) { options.help = true; }},
  };
  std::vector<option> all;
  for (const Known& each : known) {
    all.push_back({each.name, each.takes_value ? required_argument : no_argument, nullptr, 0});
  }
  all.push_back({});
  opterr = 0;
  int place = -1;
  for (int found = 0; (found = getopt_long(argc, argv, "h", all.data(), &place)) != -1;) {
    if (found == '?') usage(std::string(argv[optind - 1]) + " is not an option, or its value is missing");
    if (found == 'h') options.help = true;
    if (found == 0) known[place].take(optarg);
    if (options.help) return options;
  }
  if (argc - optind != 1) usage("give one PACKAGE, got " + std::to_string(argc - optind));
  options.package = argv[optind];
  options.open.runners = options.threads;
  if (!options.output.empty() && options.input.empty()) usage("--output needs --input");
  if (!options.session_sizes.empty() && options.input.empty()) usage("--session needs --input");
  if (!options.weights.empty() && options.input.empty() && options.bench_seconds == 0) {
    usage("--weights needs --input or --bench: the recorded cases belong to the package's weights");
  }
  if (options.threads > 1 && options.bench_seconds == 0) usage("--threads needs --bench");
  return options;
}

}  // namespace exportkit::run
