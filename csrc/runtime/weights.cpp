#include "runtime/weights.h"

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <set>

#include "package/consistency.h"
#include "package/errors.h"
#include "package/safetensors.h"
#include "package/state_files.h"
#include "package/text.h"
#include "runtime/inputs.h"
#include "runtime/staged_copies.h"
#include "runtime/streams.h"
#include "runtime/tensors.h"

namespace exportkit {
namespace {

using safetensors::Place;

// Copies a tensor to the strides that the code was compiled for.
at::Tensor laid_out(const at::Tensor& tensor, const Weight& weight) {
  if (tensor.strides().equals(weight.strides)) return tensor;
  return at::empty_strided(weight.shape, weight.strides, tensor.options()).copy_(tensor);
}

// Reads a tied weight, whose given tensors must be equal.
at::Tensor read_tied(const SafetensorsFile& file, const std::vector<const Place*>& places) {
  at::Tensor first = file.read(*places.front());
  for (const Place* other : places) {
    if (other == places.front() || same_content(first, file.read(*other))) continue;
    throw Error(errors::kWeights,
                places.front()->name + " and " + other->name + " differ; they are one tensor in the model",
                "Export the model again with untied weights, or give only one of the two.");
  }
  return first;
}

// The weights that a target's code takes from outside.
std::set<std::string> taken(const Target& target) {
  std::set<std::string> names;
  for (const auto& [method, constants] : target.constants) {
    for (const auto& [constant, weight] : constants) names.insert(weight);
  }
  return names;
}

// Refuses what would be ignored: sessions keep beginning as the package says.
void check_given_state(const SafetensorsFile& file, const Manifest& manifest, const InitialState& initial) {
  std::map<std::string, size_t> names;
  for (size_t i = 0; i < manifest.state.size(); ++i) {
    names.emplace(manifest.state[i].name, i);
    for (const std::string& alias : manifest.state[i].aliases) names.emplace(alias, i);
  }
  std::string other;
  for (const Place& place : file.places) {
    const auto state = names.find(place.name);
    if (state == names.end() || initial.begins_with(state->second, file.read(place))) continue;
    other += (other.empty() ? "" : ", ") + printable(place.name);
  }
  if (other.empty()) return;
  throw Error(errors::kWeights, "the weights come with state that sessions do not begin with: " + other,
              "Leave it out: sessions begin as the model was exported. To begin with other state, export it again.");
}

Weights replaced_by(const SafetensorsFile& file, const Manifest& manifest, const Target& target,
                    const Weights& packaged, const InitialState& initial) {
  const auto places = match_state(manifest.weights, manifest.state, file.places);
  check_given_state(file, manifest, initial);
  const std::set<std::string> outside = taken(target);
  Weights weights = packaged;
  for (const Weight& weight : manifest.weights) {
    if (!weight.state) continue;
    const std::vector<const Place*>& names = places.at(weight.name);
    if (!weight.record && names.size() == 1) continue;
    const at::Tensor tensor = read_tied(file, names);
    if (!weight.record) continue;
    if (!outside.contains(weight.name) && !same_content(tensor, packaged.at(weight.name))) {
      throw Error(errors::kWeights,
                  weight.name + " differs from the package's, which is built into the code of target " + target.name,
                  "Export the model with these weights.");
    }
    weights[weight.name] = laid_out(tensor, weight);
  }
  return weights;
}

constexpr uint64_t kAlignment = 512;  // as torch's allocator: kernels are chosen by their arguments' alignment

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

MappedWeights::MappedWeights(const PackageReader& reader) : mapping(reader) {
  for (const Weight& weight : reader.manifest().weights) {
    if (!weight.record) continue;
    char* data = const_cast<char*>(mapping.data(*weight.record));  // at::from_blob takes no const pointer
    tensors.emplace(weight.name, at::from_blob(data, weight.shape, weight.strides, dtype_of(weight.dtype)));
  }
}

Constants constants_of(const Target& target, const std::string& method, const Weights& weights) {
  Constants constants;
  for (const auto& [of, taken] : target.constants) {
    if (of != method) continue;
    for (const auto& [constant, name] : taken) constants.emplace(constant, weights.at(name));
  }
  return constants;
}

Weights replaced_weights(const Manifest& manifest, const Target& target, const Weights& packaged,
                         const InitialState& initial, const std::string& path) {
  return read_file({errors::kWeights, errors::kWeights}, "the weights ", path,
                   [&](const SafetensorsFile& file) { return replaced_by(file, manifest, target, packaged, initial); });
}

std::vector<at::Tensor> copied_together(const std::vector<at::Tensor>& weights, c10::Device device) {
  const c10::AutoGradMode no_grad(false);
  const c10::DeviceGuard guard(device);
  std::vector<StagedPart> parts;
  uint64_t bytes = 0;
  for (const at::Tensor& weight : weights) {
    parts.push_back({static_cast<const char*>(weight.const_data_ptr()), bytes, weight.nbytes()});
    bytes += aligned(weight.nbytes());
  }
  const at::Tensor memory = at::empty({static_cast<int64_t>(bytes)}, at::device(device).dtype(at::kByte));
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto place = static_cast<int64_t>(parts[i].place), size = static_cast<int64_t>(parts[i].bytes);
    const at::Tensor typed = memory.narrow(0, place, size).view(weights[i].scalar_type());
    copies.push_back(typed.as_strided(weights[i].sizes(), weights[i].strides()));
  }
  // The current stream may still use what the memory held before. No other stream waits for the copies.
  const auto staged = [&] {
    if (!device.is_cuda() || bytes < kWorthStaging) return false;
    wait_for_stream(device);
    char* const to = static_cast<char*>(memory.mutable_data_ptr());
    return copy_staged(memory.device().index(), to, parts, read_weights, lanes_for(bytes));
  };
  if (staged()) return copies;
  for (size_t i = 0; i < weights.size(); ++i) copies[i].copy_(weights[i]);
  wait_for_stream(device);
  return copies;
}

uint64_t weight_bytes_of(const Manifest& manifest, const Target& target) {
  const std::set<std::string> outside = taken(target);
  uint64_t bytes = 0;
  for (const Weight& weight : manifest.weights) {
    if (outside.empty() || outside.contains(weight.name)) bytes += weight_bytes(weight);
  }
  return bytes;
}

Weights on_device(const Target& target, const Weights& weights, c10::Device device) {
  Weights used;
  // The manifest was checked: the weight exists and has a record.
  for (const std::string& name : taken(target)) used.emplace(name, weights.at(name));
  if (device.is_cpu()) return used;
  std::vector<at::Tensor> given;
  for (const auto& [name, tensor] : used) given.push_back(tensor);
  const std::vector<at::Tensor> copies = copied_together(given, device);
  auto copy = copies.begin();
  for (auto& [name, tensor] : used) tensor = *copy++;
  return used;
}

}  // namespace exportkit
