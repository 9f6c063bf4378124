#include "runtime/package/signature.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <stdexcept>
#include <system_error>

#include "runtime/package/container.h"
#include "runtime/package/digest.h"
#include "runtime/package/errors.h"
#include "runtime/package/json.h"

namespace exportkit {
namespace {

constexpr size_t kMaxBytes = size_t{64} << 10;
constexpr int kMaxDepth = 4;  // of brackets
// What precedes the 32 bytes of an Ed25519 key in DER (RFC 8410).
constexpr std::string_view kEd25519Der("\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00", 12);

// The bytes of padded base64, line breaks left out; nothing where it is none, or not spelled as it must be.
std::optional<std::string> decode_base64(std::string_view text) {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string letters, bytes;
  std::copy_if(text.begin(), text.end(), std::back_inserter(letters), [](char c) { return c != '\n' && c != '\r'; });
  if (letters.empty() || letters.size() % 4 != 0) return std::nullopt;
  uint32_t bits = 0;
  int count = 0;
  const size_t end = letters.find('=');
  if (end != std::string::npos &&
      (letters.size() - end > 2 || letters.find_first_not_of('=', end) != std::string::npos)) {
    return std::nullopt;
  }
  for (const char letter : letters.substr(0, end)) {
    const size_t value = kLetters.find(letter);
    if (value == std::string_view::npos) return std::nullopt;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) {
      bytes += static_cast<char>(bits >> (count -= 8) & 0xff);
      bits &= (1U << count) - 1;
    }
  }
  if (bits != 0) return std::nullopt;  // a last letter with more than the last byte
  return bytes;
}

const char* not_guarded(const struct stat& status) {
  if (status.st_uid != 0 && status.st_uid != geteuid()) return "belongs to another user";
  // /tmp's bit: only the owner of a folder, or of what is in it, renames or removes that.
  const bool sticky = S_ISDIR(status.st_mode) && (status.st_mode & S_ISVTX) != 0;
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0 && !sticky) return "may be written to by other users";
  return nullptr;
}

void check_guarded(const std::filesystem::path& path, const struct stat& status) {
  if (const char* reason = not_guarded(status)) throw std::invalid_argument(reason);
  for (auto folder = std::filesystem::canonical(path).parent_path();; folder = folder.parent_path()) {
    struct stat there{};
    if (stat(folder.c_str(), &there) != 0) throw std::system_error(errno, std::generic_category(), folder);
    if (const char* reason = not_guarded(there)) {
      throw std::invalid_argument("is in " + folder.string() + ", which " + reason);
    }
    if (folder == folder.parent_path()) return;
  }
}

bool is_sha256(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

std::string read_sha256(JsonReader& json) {
  std::string text = json.string();
  if (!is_sha256(text)) json.fail("no sha256");
  return text;
}

// Notes a key of an object; each is there at most once, since the text was looked through for that.
void require_all(JsonReader& json, size_t seen, size_t all) {
  if (seen != all) json.fail("an object without a key that it must have");
}

Signature read_signature(JsonReader& json) {
  Signature out;
  size_t seen = 0;
  json.object([&](std::string_view key) {
    ++seen;
    if (key == "key_id") {
      out.key_id = read_sha256(json);
    } else if (key == "algorithm") {
      if (json.string() != "ed25519") json.fail("an algorithm other than ed25519");
    } else if (key == "signature") {
      const std::string text = json.string();
      const auto bytes = text.size() == 88 ? decode_base64(text) : std::nullopt;
      if (!bytes || bytes->size() != 64) json.fail("no 64 bytes in base64");
      out.bytes = *bytes;
    } else {
      json.fail("an unknown key");
    }
  });
  require_all(json, seen, 3);
  return out;
}

Signatures read_signatures(JsonReader& json, const std::string& name) {
  Signatures out;
  size_t seen = 0;
  json.object([&](std::string_view key) {
    ++seen;
    if (key == "format_version") {
      json.number_text();  // it was looked at before
    } else if (key == "manifest_sha256") {
      out.manifest_sha256 = read_sha256(json);
    } else if (key == "file_sha256") {
      out.file_sha256 = read_sha256(json);
    } else if (key == "signatures") {
      json.array([&] { out.signatures.push_back(read_signature(json)); });
    } else {
      json.fail("an unknown key");
    }
  });
  require_all(json, seen, 4);
  if (out.signatures.empty()) json.fail("no signature");
  std::set<std::string> ids;
  for (const Signature& signature : out.signatures) {
    if (!ids.insert(signature.key_id).second) {
      throw Error(errors::kSignature, "the signature file " + name + " has two signatures by key " + signature.key_id);
    }
  }
  return out;
}

void check_version(JsonReader json, const std::string& name) {
  if (json.peek() != JsonReader::Kind::kObject || !json.seek("format_version") ||
      json.peek() != JsonReader::Kind::kNumber || !json.at_integer()) {
    json.fail("no object with an integer `format_version`");
  }
  if (const std::string_view version = json.number_text(); version != "1") {
    throw Error(errors::kSignature,
                "the signature file " + name + " has format version " + std::string(version.substr(0, 40)) +
                    "; this exportkit reads 1",
                "Install an exportkit that reads it, or sign the package again.");
  }
}

}  // namespace

PublicKey read_public_key(const std::string& source, bool guarded) {
  constexpr std::string_view kBegin = "-----BEGIN PUBLIC KEY-----", kEnd = "-----END PUBLIC KEY-----";
  const bool inline_text = source.find("-----BEGIN") != std::string::npos;
  const std::string name = inline_text ? "the public key given as text" : "the public key " + source;
  std::string text = source;
  if (!inline_text) {
    try {
      const auto content = read_small(source, guarded);
      if (!content) throw Error(errors::kUsage, name + " cannot be read: there is no such file");
      text = *content;
    } catch (const std::system_error& error) {
      throw Error(errors::kUsage, name + " cannot be read: " + error.code().message());
    } catch (const std::invalid_argument& error) {
      throw Error(errors::kUsage, name + " " + error.what());
    }
  }
  if (text.find("PRIVATE KEY-----") != std::string::npos) {
    throw Error(errors::kUsage, name + " is a private one; it belongs to the signer alone",
                "openssl pkey -in private.pem -pubout");
  }
  const size_t begin = text.find(kBegin), end = text.find(kEnd);
  const auto der =
      begin == std::string::npos || end == std::string::npos || end < begin
          ? std::nullopt
          : decode_base64(std::string_view(text).substr(begin + kBegin.size(), end - begin - kBegin.size()));
  if (!der) throw Error(errors::kUsage, name + " is not PEM of a public key");
  PublicKey key{{}, {}, inline_text ? "text" : source};
  if (der->size() == kEd25519Der.size() + 32 && der->starts_with(kEd25519Der)) {
    key.raw = der->substr(kEd25519Der.size());
    key.id = sha256_hex(key.raw);
  }
  return key;
}

Signatures decode_signatures(std::string_view content, const std::string& name) {
  try {
    JsonReader json(content, kMaxDepth);
    JsonReader whole = json;
    whole.skip();
    whole.end();
    check_version(json, name);
    if (!whole.oddity().empty()) throw JsonError("it holds " + whole.oddity());
    return read_signatures(json, name);
  } catch (const JsonError& error) {
    throw Error(errors::kSignature,
                "the signature file " + name + " is not JSON of the shape FORMAT.md gives: " + error.what());
  }
}

const PublicKey* signer(const Signatures& signatures, const std::string& manifest_sha256,
                        const std::vector<PublicKey>& keys, const std::string& name) {
  if (signatures.manifest_sha256 != manifest_sha256) {
    throw Error(errors::kSignature,
                name + " is the signature of another package: of one whose manifest has sha256 " +
                    signatures.manifest_sha256 + ", and this one's has " + manifest_sha256,
                "The package was changed or exchanged after it was signed, or the signature is of another build.");
  }
  const std::string statement = "exportkit package signature 1\nmanifest-sha256 " + signatures.manifest_sha256 +
                                "\nfile-sha256 " + signatures.file_sha256 + "\n";
  const PublicKey* present = nullptr;
  for (const PublicKey& key : keys) {
    const auto given = std::find_if(signatures.signatures.begin(), signatures.signatures.end(),
                                    [&](const Signature& signature) { return signature.key_id == key.id; });
    if (given == signatures.signatures.end()) continue;
    if (verify_ed25519(key.raw, statement, given->bytes)) return &key;
    if (present == nullptr) present = &key;
  }
  if (present == nullptr) return nullptr;
  throw Error(errors::kSignature,
              name + ": the signature by key " + present->id + " (" + present->source + ") does not hold",
              "The signature file was changed after it was written. Get it again.");
}

std::optional<std::string> read_small(const std::filesystem::path& path, bool guarded) {
  // Non-blocking, or a FIFO would wait for a writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
  const struct Closing {
    int fd;
    ~Closing() { close(fd); }
  } closing{fd};
  struct stat status{};
  if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), path);
  if (!S_ISREG(status.st_mode)) throw std::invalid_argument("is not a plain file");
  if (guarded) check_guarded(path, status);
  std::string content = read_at(fd, 0, kMaxBytes + 1);
  if (content.size() > kMaxBytes) throw std::invalid_argument("has more than " + std::to_string(kMaxBytes) + " bytes");
  return content;
}

}  // namespace exportkit
