// Generates as generate.py does: generate llm.pt2 COUNT [--temperature T] [--top-k K] [--seed S] TEXT...
//
// Tokens are bytes. Each line has the next token of each text, and is written as it comes. The same seed draws the same
// tokens; Python draws others. A text may be as long as one `prefill` reads.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <exportkit/runtime.h>

#include <algorithm>
#include <iostream>
#include <random>
#include <string>
#include <vector>

struct Options {
  std::string package;
  int64_t count = 0;
  double temperature = 0;  // 0 takes the likeliest token
  int64_t top_k = 0;       // 0 keeps all
  uint64_t seed = 0;
  std::vector<std::string> texts;
};

// Throws std::exception for what is no number.
Options parse(const std::vector<std::string>& arguments) {
  Options options;
  std::vector<std::string> others;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i];
    const bool known = name == "--temperature" || name == "--top-k" || name == "--seed";
    if (!known) {
      others.push_back(name);
      continue;
    }
    const std::string& value = arguments.at(++i);
    if (name == "--temperature") options.temperature = std::stod(value);
    if (name == "--top-k") options.top_k = std::stoll(value);
    if (name == "--seed") options.seed = std::stoull(value);
  }
  options.package = others.at(0);
  options.count = std::stoll(others.at(1));
  options.texts.assign(others.begin() + 2, others.end());
  if (options.texts.empty()) throw std::invalid_argument("no text");
  return options;
}

// The texts as rows of [batch, longest], and their lengths.
std::pair<at::Tensor, at::Tensor> encoded(const std::vector<std::string>& texts) {
  const auto batch = int64_t(texts.size());
  size_t longest = 1;
  for (const std::string& text : texts) longest = std::max(longest, text.size());
  at::Tensor tokens = at::zeros({batch, int64_t(longest)}, at::kLong), lengths = at::zeros({batch}, at::kLong);
  for (int64_t row = 0; row < batch; ++row) {
    lengths[row] = int64_t(texts[row].size());
    for (size_t i = 0; i < texts[row].size(); ++i) tokens[row][int64_t(i)] = int64_t(uint8_t(texts[row][i]));
  }
  return {tokens, lengths};
}

// The next token of each row of logits [batch, vocabulary]: [batch, 1], on the CPU.
at::Tensor choose(const at::Tensor& logits, const Options& options, std::mt19937_64& random) {
  const at::Tensor scores = logits.to(at::kCPU, at::kDouble);
  if (options.temperature <= 0) return scores.argmax(-1, true);
  const int64_t vocabulary = scores.size(1);
  const int64_t kept = options.top_k > 0 ? std::min(options.top_k, vocabulary) : vocabulary;
  const auto [best, order] = scores.topk(kept);
  const at::Tensor weights = best.div(options.temperature).softmax(-1).contiguous();
  at::Tensor token = at::empty({scores.size(0), 1}, at::kLong);
  for (int64_t row = 0; row < scores.size(0); ++row) {
    const double* each = weights[row].const_data_ptr<double>();
    std::discrete_distribution<int64_t> draw(each, each + kept);
    token[row][0] = order[row][draw(random)];
  }
  return token;
}

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse({argv + 1, argv + argc});
  } catch (const std::exception&) {
    std::cerr << "usage: " << argv[0] << " PACKAGE COUNT [--temperature T] [--top-k K] [--seed S] TEXT...\n";
    return 2;
  }
  try {
    const exportkit::Model model = exportkit::Model::open(options.package);
    exportkit::Session session = model.session({{"batch", int64_t(options.texts.size())}});
    const auto [tokens, lengths] = encoded(options.texts);
    std::mt19937_64 random(options.seed);
    const at::Device device = model.device();
    at::Tensor logits = session.run("prefill", {tokens.to(device), lengths.to(device)}).at(0);
    for (int64_t step = 0; step < options.count; ++step) {
      const at::Tensor token = choose(logits, options, random);
      for (int64_t row = 0; row < token.size(0); ++row) std::cout << (row ? " " : "") << token[row][0].item<int64_t>();
      std::cout << std::endl;
      if (step + 1 < options.count) logits = session.run("decode", {token.to(device)}).at(0);
    }
  } catch (const exportkit::Error& error) {
    std::cerr << error.name() << ": " << error.what() << "\n";
    return error.exit_code();
  }
}
