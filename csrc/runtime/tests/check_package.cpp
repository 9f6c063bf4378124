// What the C++ reader says of packages and their parts, for the tests to hold against what Python says.
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/package/digest.h"
#include "runtime/package/reader.h"
#include "runtime/package/safetensors.h"
#include "runtime/package/text.h"
#include "runtime/tests/commands.h"

using namespace exportkit;

namespace {

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// package PATH
std::string package(const Words& words) {
  const PackageReader reader(words.at(1));
  reader.verify();
  return "{\"ok\": true, \"manifest_sha256\": \"" + reader.manifest_sha256() + "\"}";
}

// whole PATH: the digest of the file, and where its records are
std::string whole(const Words& words) {
  const PackageReader reader(words.at(1));
  std::string out = "{\"sha256\": \"" + reader.sha256() + "\", \"offsets\": {";
  for (const Record& record : reader.manifest().records) {
    out += (&record == reader.manifest().records.data() ? "" : ", ") + json_text(record.name) + ": " +
           std::to_string(reader.data_offset(record.name));
  }
  reader.check_unchanged();
  return answer(out + "}}");
}

// extract PATH RECORD DESTINATION
std::string extract(const Words& words) {
  const PackageReader reader(words.at(1));
  reader.extract(words.at(2), words.at(3));
  return answer(json_text(sha256_hex(reader.read(words.at(2)))));
}

// changed PATH NEW: whether it is noticed that NEW is written into the open file
std::string changed(const Words& words) {
  const PackageReader reader(words.at(1));
  std::ofstream(words.at(1), std::ios::binary) << content_of(words.at(2));
  reader.check_unchanged();
  return answer("null");
}

// crc32 PATH: in two pieces, cut everywhere
std::string crc(const Words& words) {
  const std::string content = content_of(words.at(1));
  const uint32_t value = crc32(0, content.data(), content.size());
  for (size_t cut = 0; cut <= content.size(); ++cut) {
    const uint32_t first = crc32(0, content.data(), cut);
    if (crc32(first, content.data() + cut, content.size() - cut) != value) return answer("\"depends on the pieces\"");
  }
  return answer(std::to_string(value));
}

// ed25519 KEY MESSAGE SIGNATURE, each a file
std::string ed25519(const Words& words) {
  const bool valid = verify_ed25519(content_of(words.at(1)), content_of(words.at(2)), content_of(words.at(3)));
  return answer(valid ? "true" : "false");
}

// identifiers PATH: for each line of a file, whether it is one
std::string identifiers(const Words& words) {
  std::istringstream lines(content_of(words.at(1)));
  std::string out;
  for (std::string line; std::getline(lines, line);) out += is_identifier(line) ? '1' : '0';
  return answer(json_text(out));
}

// safetensors PATH [NEW]: what is in a file; it is written again to NEW
std::string tensors(const Words& words) {
  const std::string content = content_of(words.at(1));
  const std::vector<safetensors::View> views = safetensors::parse(content);
  if (words.size() > 2) std::ofstream(words.at(2), std::ios::binary) << safetensors::serialize(views);
  std::string out;
  for (const safetensors::View& view : views) {
    out += (out.empty() ? "[" : ", [") + json_text(view.name) + ", " + json_text(view.dtype) + ", [";
    for (size_t i = 0; i < view.shape.size(); ++i) out += (i ? ", " : "") + std::to_string(view.shape[i]);
    out += "], \"" + sha256_hex(view.data) + "\"]";
  }
  return answer("[" + out + "]");
}

}  // namespace

int main(int argc, char** argv) {
  return run_all({{"package", package},
                  {"whole", whole},
                  {"extract", extract},
                  {"changed", changed},
                  {"crc32", crc},
                  {"ed25519", ed25519},
                  {"identifiers", identifiers},
                  {"safetensors", tensors}},
                 argc, argv);
}
