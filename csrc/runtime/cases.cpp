#include "runtime/cases.h"

#include <set>
#include <string_view>

#include "package/case_tensors.h"
#include "package/safetensors.h"
#include "runtime/compare.h"
#include "runtime/methods.h"
#include "runtime/tensors.h"

namespace exportkit {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

// What the metadata of a case's file say of its inputs. A stranger's file may say anything.
std::string edge_case_in(const std::string& content) {
  constexpr size_t kLongest = 1000;
  const safetensors::Metadata metadata = safetensors::parse_metadata(content);
  const auto said = metadata.find("edge_case");
  return said == metadata.end() || said->second.size() > kLongest ? "" : said->second;
}

// The references of a call's or a state's results: `key` gives a result's place in the record.
template <class Key>
Tensors references_of(const Tensors& tensors, const Accuracies& accuracies, const std::vector<TensorOutput>& results,
                      const Key& key) {
  std::set<std::string_view> has_reference;
  for (const auto& [name, accuracy] : accuracies) has_reference.insert(name);
  Tensors references;
  for (size_t i = 0; i < results.size(); ++i) {
    if (has_reference.contains(results[i].name)) references.emplace(results[i].name, tensors.at(key(i)));
  }
  return references;
}

RecordedCall read_call(const Tensors& tensors, const Call& call, const CaseCall& recorded, size_t number,
                       c10::Device device) {
  RecordedCall read{recorded.method, {recorded.sizes.begin(), recorded.sizes.end()}, {}, {}, {}, {}};
  const auto key = [&](const char* kind, size_t i) {
    return std::to_string(number) + "." + kind + "." + std::to_string(i);
  };
  std::vector<std::string> references;  // where those of the call's results are, in the order of results_of
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    read.outputs.push_back(tensors.at(key("output", i)).to(device));
    references.push_back(key("reference", i));
  }
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    read.inputs.push_back(tensors.at(key("input", i)).to(device));
    if (!call.inputs[i].written) continue;
    read.written.emplace(call.inputs[i].name, tensors.at(key("written", i)).to(device));
    references.push_back(key("written_reference", i));
  }
  read.references =
      references_of(tensors, recorded.accuracy, results_of(call), [&](size_t i) { return references[i]; });
  return read;
}

}  // namespace

RecordedCase read_case(const PackageReader& reader, size_t index, c10::Device device) {
  const Manifest& manifest = reader.manifest();
  const Case& recorded = manifest.cases.at(index);
  const auto methods = by_name(manifest.methods);
  const std::string content = reader.read(recorded.record);
  check_case(manifest, recorded, content);  // each tensor that the manifest speaks of is there
  const Tensors tensors = parse_tensors(content);
  RecordedCase read;
  read.edge_case = edge_case_in(content);
  for (const CaseCall& call : recorded.calls) {
    const Call& described = methods.at(call.method)->call;
    read.calls.push_back(read_call(tensors, described, call, read.calls.size(), device));
  }
  if (!tensors.contains("state.0")) return read;
  for (size_t i = 0; i < manifest.state.size(); ++i) {
    read.state.emplace(manifest.state[i].name, tensors.at("state." + std::to_string(i)).to(device));
  }
  read.state_references = references_of(tensors, recorded.state_accuracy, results_of(manifest.state),
                                        [](size_t i) { return "state_reference." + std::to_string(i); });
  return read;
}

}  // namespace exportkit
