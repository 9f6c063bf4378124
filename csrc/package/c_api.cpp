#include "package/c_api.h"

#include <new>
#include <system_error>
#include <utility>

#include "package/atomic.h"
#include "package/json_fields.h"
#include "package/json_text.h"

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

std::string json(const PublicKey& key) {
  return json_object(
      {{"id", json_text(key.id)}, {"source", json_text(key.source)}, {"is_ed25519", json_bool(key.is_ed25519())}});
}

std::string json(const std::vector<PublicKey>& keys) {
  return json_list(keys, [](const PublicKey& key) { return json(key); });
}

}  // namespace exportkit::c_api

extern "C" {

int ek_abi_version(void) { return 4; }

const ek_error* ek_last_error(void) { return &exportkit::c_api::last_call().error; }

ek_text ek_take_warnings(void) {
  auto& own = exportkit::c_api::last_call();
  own.text = exportkit::json_list(std::exchange(own.warnings, {}), exportkit::json_text);
  return exportkit::c_api::view(own.text);
}

void ek_before_fork(void) { exportkit::before_fork(); }

void ek_after_fork(int child) { exportkit::after_fork(child != 0); }
}
