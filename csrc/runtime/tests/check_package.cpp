// What the C++ reader says of packages and their parts, for the tests to hold against what Python says.
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/package/digest.h"
#include "runtime/package/keys.h"
#include "runtime/package/openssf.h"
#include "runtime/package/reader.h"
#include "runtime/package/safetensors.h"
#include "runtime/package/state_matching.h"
#include "runtime/package/text.h"
#include "runtime/package/trust.h"
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

// key PEM: its id
std::string key(const Words& words) { return answer(json_text(read_public_key(words.at(1)).id)); }

// verifies PEM MESSAGE SIGNATURE, each a file
std::string verifies(const Words& words) {
  const PublicKey key = read_public_key(words.at(1));
  return answer(key.verifies(content_of(words.at(3)), content_of(words.at(2))) ? "true" : "false");
}

// bundle PATH KEY_ID SHA256: whether it is one by this key over a file of this digest, if its signature holds
std::string bundle(const Words& words) {
  const openssf::Bundle bundle = openssf::decode(content_of(words.at(1)), "it");
  const auto statement = decode_base64(bundle.payload);
  const bool taken = bundle.key_id == words.at(2) && statement && decode_base64(bundle.signature) &&
                     openssf::signed_digest(*statement, "it") == words.at(3);
  return answer(taken ? "true" : "false");
}

// trust SYSTEM_POLICY PATH SIGNATURE KEY...: SIGNATURE may be empty
std::string trust(const Words& words) {
  const PackageReader reader(words.at(2));
  check_trust(reader, {words.begin() + 4, words.end()}, words.at(3), words.at(1));
  return answer("null");
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

// state PACKAGE PATH: whether a safetensors file has all of the state, and nothing else
std::string state(const Words& words) {
  const PackageReader reader(words.at(1));
  const std::string content = content_of(words.at(2));
  match_state(reader.manifest().weights, safetensors::parse_header(content, content.size()));
  return answer("null");
}

}  // namespace

int main(int argc, char** argv) {
  return run_all({{"package", package},
                  {"whole", whole},
                  {"extract", extract},
                  {"changed", changed},
                  {"crc32", crc},
                  {"key", key},
                  {"verifies", verifies},
                  {"trust", trust},
                  {"state", state},
                  {"bundle", bundle},
                  {"identifiers", identifiers},
                  {"safetensors", tensors}},
                 argc, argv);
}
