#include "package/package_folder.h"

#include <dirent.h>

#include <memory>
#include <vector>

#include "package/errors.h"
#include "package/json_fields.h"
#include "package/sha256.h"
#include "package/small_files.h"

namespace exportkit {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxDepth = 16;                  // of brackets
constexpr size_t kMaxBytes = size_t{4} << 20;  // of a manifest, which is what registries take
constexpr const char* kImageManifest = "application/vnd.oci.image.manifest.v1+json";
constexpr const char* kModel = "application/vnd.cncf.model.manifest.v1+json";
constexpr const char* kPackageLayer = "application/vnd.cncf.model.weight.v1.raw";
constexpr std::string_view kFilePath = "org.cncf.model.filepath", kSha256 = "sha256:";

[[noreturn]] void refuse(const fs::path& path, const std::string& what) {
  throw Error(errors::kArtifact, path.string() + " " + what,
              "`exportkit oci` writes such folders, and `skopeo copy` copies them whole.");
}

[[noreturn]] void mismatch(const fs::path& path, const std::string& what) {
  throw Error(errors::kDigestMismatch, path.string() + " has " + what,
              "The copy is incomplete or damaged. Copy it again.");
}

fs::path not_a_link(fs::path path) {
  if (fs::is_symlink(path)) refuse(path, "is a link, which could lead out of the folder");
  return path;
}

std::string small_file(const fs::path& path, size_t most = kMaxBytes) {
  std::optional<std::string> content;
  try {
    content = read_limited(not_a_link(path), /*guarded=*/false, most);
  } catch (const std::invalid_argument& error) {
    refuse(path, error.what());
  }
  if (!content) refuse(path, "does not exist");
  return *content;
}

using Members = std::map<std::string_view, std::function<void()>>;

// Reads an object of a file that must have these keys.
void read_json(const fs::path& path, const std::string& text, const std::function<Members(JsonReader&)>& members) {
  try {
    JsonReader json = JsonReader::checked(text, kMaxDepth);
    read_members(json, members(json));
  } catch (const JsonError& error) {
    refuse(path, std::string("does not follow the OCI image specification: ") + error.what());
  }
}

// A blob as a descriptor names it. `file` is the name that it has outside the layout.
struct Blob {
  fs::path path;
  std::string media_type, sha256, file;
  int64_t size = -1;

  void check_size() const {
    std::error_code unreadable;
    const uintmax_t found = fs::file_size(not_a_link(path), unreadable);
    if (unreadable) refuse(path, "cannot be read: " + unreadable.message());
    if (found != static_cast<uintmax_t>(size)) {
      mismatch(path, std::to_string(found) + " bytes; its descriptor says " + std::to_string(size));
    }
  }

  std::string text(size_t most = kMaxBytes) const {
    check_size();
    const std::string content = small_file(path, most);
    if (sha256_hex(content) != sha256) mismatch(path, "another digest than its name");
    return content;
  }
};

std::string digest(JsonReader& json) {
  const std::string value = json.string();
  if (!value.starts_with(kSha256) || value.size() != kSha256.size() + 64 ||
      value.find_first_not_of("0123456789abcdef", kSha256.size()) != std::string::npos) {
    json.fail("expected sha256: and 64 hexadecimal digits");
  }
  return value.substr(kSha256.size());
}

// Reads a list of descriptors.
std::vector<Blob> blobs(JsonReader& json, const fs::path& folder) {
  std::vector<Blob> found;
  json.array([&] {
    Blob blob;
    json.object([&](std::string_view key) {
      if (key == "mediaType") {
        blob.media_type = json.string();
      } else if (key == "digest") {
        blob.sha256 = digest(json);
      } else if (key == "size") {
        blob.size = json.integer();
      } else if (key == "annotations") {
        json.object([&](std::string_view name) { name == kFilePath ? void(blob.file = json.string()) : json.skip(); });
      } else {
        json.skip();
      }
    });
    if (blob.media_type.empty() || blob.sha256.empty() || blob.size < 0) {
      json.fail("expected mediaType, digest and size");
    }
    blob.path = folder / blob.sha256;
    found.push_back(blob);
  });
  return found;
}

// The layers of the only artifact.
std::vector<Blob> layers_of(const fs::path& path) {
  const fs::path folder = not_a_link(not_a_link(path / "blobs") / "sha256"), index = path / "index.json";
  std::vector<Blob> manifests, layers;
  read_json(index, small_file(index),
            [&](JsonReader& json) { return Members{{"manifests", [&] { manifests = blobs(json, folder); }}}; });
  if (manifests.size() != 1) {
    throw Error(errors::kUsage, path.string() + " has " + std::to_string(manifests.size()) + " manifests, not one",
                "Copy one into a layout of its own: skopeo copy oci:DIR:NAME oci:NEW.");
  }
  const Blob& manifest = manifests[0];
  if (manifest.media_type != kImageManifest) {
    refuse(path, "has no manifest of an artifact, but " + shown(manifest.media_type));
  }
  std::string kind;
  read_json(manifest.path, manifest.text(), [&](JsonReader& json) {
    return Members{{"artifactType", [&] { kind = json.string(); }}, {"layers", [&] { layers = blobs(json, folder); }}};
  });
  if (kind != kModel) refuse(path, "has an artifact of type " + shown(kind) + "; a package's is " + kModel);
  return layers;
}

OpenedFile open_layout(const fs::path& path) {
  const std::vector<Blob> layers = layers_of(path);
  const Blob* package = nullptr;
  for (const Blob& layer : layers) {
    if (layer.media_type != kPackageLayer) continue;
    if (package != nullptr) refuse(path, "has an artifact of several packages; one has one");
    package = &layer;
  }
  if (package == nullptr) refuse(path, std::string("has no layer of type ") + kPackageLayer);
  package->check_size();
  OpenedFile opened = OpenedFile::by_path(package->path);
  opened.name = fs::weakly_canonical(path).filename().string();
  opened.layer = {package->sha256, {}};
  for (const Blob& layer : layers) {
    for (const char* suffix : {kOwnSuffix, kBundleSuffix}) {
      if (layer.file != package->file + suffix) continue;
      const bool is_new = opened.layer->signatures.emplace(suffix, layer.text(kSmallFileBytes)).second;
      if (!is_new) refuse(path, "has several signatures " + shown(layer.file));
    }
  }
  return opened;
}

}  // namespace

OpenedFile open_in_folder(const fs::path& path) {
  if (fs::exists(fs::symlink_status(path / "oci-layout"))) return open_layout(path);
  std::vector<fs::path> packages;
  // Uses readdir for the reason given in atomic.cpp.
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(path.c_str()), closedir);
  if (!entries) throw FileError(path);
  while (const dirent* entry = readdir(entries.get())) {
    const fs::path file = path / entry->d_name;
    if (file.extension() == ".pt2" && !fs::is_directory(file)) packages.push_back(file);
  }
  if (packages.size() == 1) return OpenedFile::by_path(not_a_link(packages[0]));
  throw Error(errors::kUsage,
              path.string() + " is a folder with " + std::to_string(packages.size()) + " .pt2 files, not one",
              packages.empty() ? "Give a package, a folder with one, or an OCI image layout (`exportkit oci`)."
                               : "Give one of the files.");
}

}  // namespace exportkit
