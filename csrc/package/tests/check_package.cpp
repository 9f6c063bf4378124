// Reads parts of packages for which the C header has no separate function.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "package/digests.h"
#include "package/mapping.h"
#include "package/reader.h"
#include "package/safetensors.h"
#include "package/targets.h"
#include "package/tests/commands.h"
#include "package/trust.h"

using namespace exportkit;

namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// trust SYSTEM_POLICY PATH SIGNATURE KEY...: the sources of the keys that signed; SIGNATURE may be empty
std::string trust(const Words& words) {
  const PackageReader reader(OpenedFile::by_path(words.at(2)));
  const auto source = [](const PublicKey& key) { return json_text(key.source); };
  return answer(json_list(check_trust(reader, {{words.begin() + 4, words.end()}, words.at(3)}, words.at(1)), source));
}

// verify PATH: opens a package, checks every digest, and says its name
std::string verified(const Words& words) {
  const PackageReader reader(OpenedFile::by_path(words.at(1)));
  reader.verify();
  return answer(json_text(reader.manifest().name));
}

// host: the platform and the level of this CPU
std::string host(const Words&) {
  return answer("[" + json_text(host_platform()) + ", " + json_text(host_cpu_isa()) + "]");
}

// safetensors PATH [NEW]: the tensors of a file, which is also written to NEW
std::string tensors(const Words& words) {
  const std::string content = content_of(words.at(1));
  const std::vector<safetensors::View> views = safetensors::parse(content);
  if (words.size() > 2) std::ofstream(words.at(2), std::ios::binary) << safetensors::serialize(views);
  return answer(json_list(views, [](const safetensors::View& view) {
    const auto number = [](int64_t size) { return std::to_string(size); };
    return concat("[", json_text(view.name), ", ", json_text(view.dtype), ", ", json_list(view.shape, number), ", ",
                  json_text(sha256_hex(view.data)), "]");
  }));
}

// weights PATH [SIZE]: the weights' content by record, which is read when the package is closed and was cut to a size
std::string weights(const Words& words) {
  auto reader = std::make_unique<PackageReader>(OpenedFile::by_path(words.at(1)));
  const WeightMapping mapping(*reader);
  std::map<std::string, std::string> contents;
  for (const Weight& weight : reader->manifest().weights) {
    if (weight.record) contents.emplace(*weight.record, std::string(size_t(reader->record(*weight.record).size), '-'));
  }
  reader.reset();
  if (words.size() > 2) std::filesystem::resize_file(words.at(1), std::stoul(words.at(2)));
  JsonMembers out;
  for (auto& [record, content] : contents) {
    const size_t cut = content.size() / 3;
    read_weights(mapping.data(record), content.data(), cut);
    read_weights(mapping.data(record) + cut, content.data() + cut, content.size() - cut);
    std::string copy(content.size(), '-');
    read_weights(content.data(), copy.data(), copy.size());  // which is not mapped
    out.emplace_back(record, json_text(sha256_hex(copy)));
  }
  return answer(json_object(out));
}

}  // namespace

int main(int argc, char** argv) {
  return run_all(
      {{"trust", trust}, {"verify", verified}, {"host", host}, {"safetensors", tensors}, {"weights", weights}}, argc,
      argv);
}
