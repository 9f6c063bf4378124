// PEFT's description of an adapter: https://huggingface.co/docs/peft/developer_guides/checkpoint
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace exportkit {

struct AdapterConfig {
  double alpha = 8;
  bool by_root = false;                                  // of the rank: rsLoRA
  std::vector<std::pair<std::string, double>> of_names;  // modules with another alpha

  // What the product of a module's two matrices is multiplied with.
  double scale(std::string_view module, int64_t rank) const;
};

// Reads adapter_config.json in the folder of an adapter's file; nothing if there is none. StateError: it cannot be
// read, or it describes more than plain LoRA.
std::optional<AdapterConfig> read_adapter_config(const std::string& adapter);

}  // namespace exportkit
