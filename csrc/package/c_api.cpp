#include "package/c_api.h"

#include <iterator>
#include <new>
#include <sstream>
#include <system_error>
#include <utility>

#include "package/accuracy.h"
#include "package/atomic.h"
#include "package/consistency.h"
#include "package/json_fields.h"
#include "package/signature.h"
#include "package/state_files.h"
#include "package/targets.h"
#include "package/text.h"
#include "package/trust_records.h"

namespace exportkit::c_api {
namespace {

// The results of a thread's last call.
struct LastCall {
  std::string kind, message, hint, path, text;
  std::vector<std::string> warnings;
  ek_error error{};
};

LastCall& last_call() {
  thread_local LastCall own;
  return own;
}

int failed(const std::string& kind, const std::string& message, const std::string& hint = {},
           const std::string& path = {}, int number = 0) {
  LastCall& own = last_call();
  own.kind = kind, own.message = message, own.hint = hint, own.path = path;
  own.error = {own.kind.c_str(), own.message.c_str(), own.hint.c_str(), own.path.c_str(), number};
  return -1;
}

}  // namespace

int note_failure() {
  try {
    throw;
  } catch (const Error& error) {
    return failed(error.name(), error.message(), error.hint());
  } catch (const JsonError& error) {
    return failed(errors::kManifestSyntax.name,
                  std::string("part of a manifest does not follow FORMAT.md: ") + error.what());
  } catch (const FileError& error) {
    return failed("OSError", error.reason(), {}, error.path().string(), error.code().value());
  } catch (const std::filesystem::filesystem_error& error) {
    return failed("OSError", error.code().message(), {}, error.path1().string(), error.code().value());
  } catch (const std::system_error& error) {
    return failed("OSError", error.code().message(), {}, {}, error.code().value());
  } catch (const std::bad_alloc&) {
    return failed(errors::kHost.name, "not enough memory");
  } catch (const std::exception& error) {
    return failed(errors::kExportkit.name, error.what());
  }
}

void warn(const std::string& warning) { last_call().warnings.push_back(warning); }

void answer(ek_text* out, std::string text) {
  last_call().text = std::move(text);
  *out = {last_call().text.data(), last_call().text.size()};
}

ek_text view(const std::string& text) { return {text.data(), text.size()}; }

std::vector<safetensors::Place> read_places(JsonReader& json) {
  using safetensors::Place;
  return list(object(FIELD(Place, name, text), FIELD(Place, dtype, text), FIELD(Place, shape, list(integer))))(json);
}

SignatureRequest request_of(const ek_demand& demand) {
  SignatureRequest request{{demand.keys, demand.keys + demand.key_count}};
  if (demand.signature != nullptr) request.signature = demand.signature;
  if (demand.signature_content != nullptr) {
    request.signature_content.assign(demand.signature_content, demand.signature_content_size);
  }
  return request;
}

std::string key_json(const PublicKey& key) {
  return json_object(
      {{"id", json_text(key.id)}, {"source", json_text(key.source)}, {"is_ed25519", json_bool(key.is_ed25519())}});
}

}  // namespace exportkit::c_api

using namespace exportkit;
using namespace exportkit::c_api;

struct ek_folder {
  TemporaryFolder folder;
};

namespace {

std::vector<std::string> words(const char* text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

std::pair<int, int> capability(JsonReader& json) {
  const std::vector<int64_t> numbers = list(integer)(json);
  if (numbers.size() != 2) json.fail("expected a capability [major, minor]");
  return {static_cast<int>(numbers[0]), static_cast<int>(numbers[1])};
}

Host parse_host(std::string_view given) {
  JsonReader json(given, 8);
  return object(FIELD(Host, platform, text), FIELD(Host, cpu_isa, text), FIELD(Host, torch, text),
                FIELD(Host, cuda, nullable(text)), FIELD(Host, driver, nullable(text)),
                FIELD(Host, capabilities, list(capability)), FIELD(Host, current_cuda, integer))(json);
}

}  // namespace

extern "C" {

int ek_abi_version(void) { return 4; }

const ek_error* ek_last_error(void) { return &last_call().error; }

ek_text ek_take_warnings(void) {
  auto& own = last_call();
  own.text = json_list(std::exchange(own.warnings, {}), json_text);
  return view(own.text);
}

void ek_before_fork(void) { before_fork(); }

void ek_after_fork(int child) { after_fork(child != 0); }

int ek_cache_directory(ek_text* path) {
  return guarded([&] { answer(path, cache_directory().string()); });
}

// --- targets ---------------------------------------------------------------------------------------------------------

int ek_host(ek_text* host) {
  return guarded([&] {
    answer(host, json_object({{"platform", json_text(host_platform())}, {"cpu_isa", json_text(host_cpu_isa())}}));
  });
}

int ek_parse_device(const char* device, ek_text* parsed) {
  return guarded([&] {
    const auto [kind, index] = parse_device(device);
    answer(parsed, json_object({{"kind", json_text(kind)}, {"index", index ? std::to_string(*index) : "null"}}));
  });
}

int ek_survey(const char* targets, const char* libraries, const char* device, const char* host, ek_text* out) {
  return guarded([&] {
    const std::vector<Target> decoded = decode_targets(targets);
    const Host machine = parse_host(host);
    const Survey found = survey(decoded, decode_libraries(libraries), device, machine);
    JsonMembers rejected;
    for (const auto& [target, reason] : found.rejected) rejected.emplace_back(target->name, json_text(reason));
    const auto fitting = [&](const Choice& choice) {
      return "[" + json_text(choice.target->name) + "," + std::to_string(choice.device_index) + "," +
             json_text(fit_of(choice, machine)) + "]";
    };
    answer(out, json_object({{"fitting", json_list(found.fitting, fitting)}, {"rejected", json_object(rejected)}}));
  });
}

int ek_library_rejection(const char* library, const char* torch, ek_text* reason) {
  return guarded([&] { answer(reason, library_rejection(decode_library(library), torch).value_or("")); });
}

int ek_ptx_rejection(const char* code, size_t size, const char* driver, ek_text* reason) {
  return guarded([&] {
    const auto ptx = newest_ptx({code, size});
    answer(reason, (ptx ? ptx_rejection(*ptx, driver) : std::nullopt).value_or(""));
  });
}

int ek_fat_entries(const char* code, size_t size, ek_text* entries) {
  return guarded([&] {
    answer(entries, json_list(fat_entries({code, size}), [](const FatEntry& entry) {
             return "[" + json_text(entry.architecture) + (entry.ptx.first ? ",true]" : ",false]");
           }));
  });
}

int ek_gpu_degree(const char* machine, const char* ptx, const char* gpu, ek_text* found) {
  return guarded([&] { answer(found, degree(words(machine), words(ptx), gpu)); });
}

// --- rules for others ------------------------------------------------------------------------------------------------

int ek_check_manifest(const char* manifest, size_t size) {
  return guarded([&] { check_consistency(decode_manifest({manifest, size})); });
}

int ek_is_name(const char* text) { return is_name(text) ? 1 : 0; }

int ek_match_state(const char* weights, const char* state, const char* given, ek_text* names) {
  return guarded([&] {
    JsonReader json(given, 8);
    const std::vector<safetensors::Place> places = read_places(json);
    JsonMembers out;
    for (const auto& [weight, found] : match_state(decode_weights(weights), decode_state(state), places)) {
      const auto name = [](const safetensors::Place* place) { return json_text(place->name); };
      out.emplace_back(weight, json_list(found, name));
    }
    answer(names, json_object(out));
  });
}

int ek_public_key(const char* source, ek_text* key) {
  return guarded([&] { answer(key, key_json(read_public_key(source))); });
}

int ek_public_key_hash(const char* source, ek_text* name) {
  return guarded([&] { answer(name, read_public_key(source).hash_name()); });
}

int ek_verify_signature(const char* source, const void* signature, size_t signature_size, const void* message,
                        size_t size, int* valid) {
  return guarded([&] {
    *valid = read_public_key(source).verifies({static_cast<const char*>(signature), signature_size},
                                              {static_cast<const char*>(message), size});
  });
}

int ek_signatures(const char* path, ek_text* content) {
  return guarded([&] { answer(content, read_signatures(path).value_or("")); });
}

int ek_demanded(const ek_demand* demand, ek_text* by) {
  return guarded([&] { answer(by, demanded_by(request_of(*demand))); });
}

int ek_revocation_list(const char* path, ek_text* content) {
  return guarded([&] { answer(content, revocations_text(path)); });
}

int ek_revocations(ek_text* lists) {
  return guarded([&] {
    answer(lists, json_list(revocation_lists(), [](const RevocationList& list) {
             return json_object({{"path", json_text(list.path.string())},
                                 {"sequence", std::to_string(list.sequence)},
                                 {"keys", std::to_string(list.keys.size())},
                                 {"packages", std::to_string(list.packages.size())}});
           }));
  });
}

// --- accuracy --------------------------------------------------------------------------------------------------------

int ek_typical_magnitude(const double* reference, size_t count, double* magnitude) {
  return guarded([&] { *magnitude = typical_magnitude({reference, count}); });
}

int ek_measure_error(const double* reference, const double* values, const uint8_t* selected, size_t count,
                     double typical, double limit, ek_measured_error* error) {
  return guarded([&] {
    const MeasuredError found = measure_error({reference, count}, values, selected, typical, limit);
    *error = {{found.size.rms, found.size.greatest}, found.compared, found.beyond, found.greatest_at};
  });
}

int ek_allowed_error(const ek_accuracy* eager, const char* dtype, ek_accuracy* allowed) {
  return guarded([&] {
    const Accuracy found = allowed_error({eager->rms, eager->greatest}, dtype);
    *allowed = {found.rms, found.greatest};
  });
}

// --- other files -----------------------------------------------------------------------------------------------------

int ek_write_file(const char* path, const void* data, size_t size) {
  return guarded([&] {
    WrittenWhole file(path, 0666);
    file.write({static_cast<const char*>(data), size});
    file.finish(/*durable=*/true);
  });
}

int ek_folder_new(const char* parent, const char* prefix, ek_folder** folder) {
  return guarded([&] { *folder = new ek_folder{TemporaryFolder(parent, prefix)}; });
}

const char* ek_folder_path(const ek_folder* folder) { return folder->folder.path().c_str(); }

void ek_folder_close(ek_folder* folder) { delete folder; }
}
