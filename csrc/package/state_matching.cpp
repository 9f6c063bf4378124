#include "package/state_matching.h"

#include "package/errors.h"
#include "package/text.h"

namespace exportkit {
namespace {

using safetensors::Place;

std::vector<std::string> names_of(const Weight& weight) {
  std::vector<std::string> names{weight.name};
  names.insert(names.end(), weight.aliases.begin(), weight.aliases.end());
  return names;
}

}  // namespace

std::string kind(const std::string& dtype, const std::vector<int64_t>& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(std::to_string(size));
  return dtype + "[" + joined(sizes, ", ") + "]";
}

std::map<std::string, std::vector<const Place*>> match_state(const std::vector<Weight>& weights,
                                                             const std::vector<StateTensor>& state,
                                                             const std::vector<Place>& given) {
  std::map<std::string, const Place*> unmatched;
  for (const Place& place : given) unmatched.emplace(place.name, &place);
  for (const StateTensor& one : state) {
    unmatched.erase(one.name);
    for (const std::string& alias : one.aliases) unmatched.erase(alias);
  }
  std::map<std::string, std::vector<const Place*>> found;
  std::map<std::string, std::string> other;  // by the given name, so that messages are sorted
  std::vector<std::string> missing, not_of_the_model, of_another_kind;
  for (const Weight& weight : weights) {
    if (!weight.state) continue;
    std::vector<const Place*>& places = found[weight.name];
    const std::vector<std::string> names = names_of(weight);
    for (const std::string& name : names) {
      const auto node = unmatched.extract(name);
      if (node.empty()) continue;
      const Place& place = *places.emplace_back(node.mapped());
      if (place.dtype != weight.dtype || place.shape != weight.shape) {
        other.emplace(name, printable(name) + " is " + kind(place.dtype, place.shape) + ", not " +
                                kind(weight.dtype, weight.shape));
      }
    }
    if (places.empty()) missing.push_back(printable(joined(names, " or ")));
  }
  for (const auto& [name, place] : unmatched) not_of_the_model.push_back(printable(name));
  for (const auto& [name, text] : other) of_another_kind.push_back(text);
  std::string faults;
  const auto add = [&](const char* what, const std::vector<std::string>& which) {
    if (!which.empty()) faults += std::string("\n  ") + what + ": " + joined(which, ", ");
  };
  add("missing", missing);
  add("not in the model", not_of_the_model);
  add("wrong dtype or shape", of_another_kind);
  if (faults.empty()) return found;
  throw Error(errors::kWeights, "the weights do not fit the model" + faults,
              "Give the model's whole state_dict with the same names, dtypes and shapes. One name of a tied weight is "
              "enough.");
}

}  // namespace exportkit
