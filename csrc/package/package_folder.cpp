#include "package/package_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <memory>
#include <utility>
#include <vector>

#include "package/container.h"
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
constexpr const char* kFilePath = "org.cncf.model.filepath";

[[noreturn]] void refuse(const fs::path& path, const std::string& what) {
  throw Error(errors::kArtifact, path.string() + " " + what,
              "`exportkit oci` writes such folders, and `skopeo copy` copies them whole.");
}

// A file or a folder of this folder, which must not be a link.
Descriptor inside(const Descriptor& folder, const char* name, const fs::path& path, int flags) {
  Descriptor found(openat(folder.get(), name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW | flags));
  struct stat status{};
  if (found) return found;
  const int error = errno;
  if (fstatat(folder.get(), name, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(status.st_mode)) {
    refuse(path, "is a link, which could lead out of the folder");
  }
  if (error == ENOENT) refuse(path, "does not exist");
  throw FileError(path, error);
}

uint64_t size_of(const Descriptor& file, const fs::path& path) {
  struct stat status{};
  if (fstat(file.get(), &status) != 0) throw FileError(path);
  if (!S_ISREG(status.st_mode)) refuse(path, "is not a plain file");
  return static_cast<uint64_t>(status.st_size);
}

std::string small_content(const Descriptor& file, const fs::path& path, size_t most = kMaxBytes) {
  const uint64_t size = size_of(file, path);
  if (size > most) refuse(path, "has more than " + std::to_string(most) + " bytes");
  return read_at(file.get(), 0, size);
}

// Content that a manifest names. `file` is the name that it has outside the layout.
struct Content {
  std::string media_type, sha256, file;
  int64_t size = -1;
};

std::string digest(JsonReader& json) {
  const std::string value = json.string();
  constexpr std::string_view kAlgorithm = "sha256:";
  const bool known = value.starts_with(kAlgorithm) && value.size() == kAlgorithm.size() + 64 &&
                     value.find_first_not_of("0123456789abcdef", kAlgorithm.size()) == std::string::npos;
  if (!known) json.fail("expected sha256: and 64 hexadecimal digits");
  return value.substr(kAlgorithm.size());
}

Content content(JsonReader& json) {
  Content found;
  json.object([&](std::string_view key) {
    if (key == "mediaType") {
      found.media_type = json.string();
    } else if (key == "digest") {
      found.sha256 = digest(json);
    } else if (key == "size") {
      found.size = json.integer();
    } else if (key == "annotations") {
      json.object([&](std::string_view name) { name == kFilePath ? void(found.file = json.string()) : json.skip(); });
    } else {
      json.skip();
    }
  });
  if (found.media_type.empty() || found.sha256.empty() || found.size < 0) {
    json.fail("expected mediaType, digest and size");
  }
  return found;
}

// Reads an object that must have these keys.
void read_json(const std::string& text, const fs::path& path,
               const std::function<std::map<std::string_view, std::function<void()>>(JsonReader&)>& members) {
  try {
    JsonReader json = JsonReader::checked(text, kMaxDepth);
    read_members(json, members(json));
  } catch (const JsonError& error) {
    refuse(path, std::string("does not follow the OCI image specification: ") + error.what());
  }
}

class ImageLayout {
 public:
  ImageLayout(const Descriptor& folder, const fs::path& path)
      : path_(path),
        blobs_(
            inside(inside(folder, "blobs", path / "blobs", O_DIRECTORY), "sha256", path / "blobs/sha256", O_DIRECTORY)),
        index_(small_content(inside(folder, "index.json", path / "index.json", 0), path / "index.json")) {}

  OpenedFile package(std::string name) const {
    const std::vector<Content> layers = layers_of(only_manifest());
    const Content* package = nullptr;
    for (const Content& layer : layers) {
      if (layer.media_type != kPackageLayer) continue;
      if (package != nullptr) refuse(path_, "has an artifact of several packages; one has one");
      package = &layer;
    }
    if (package == nullptr) refuse(path_, std::string("has no layer of type ") + kPackageLayer);
    OpenedFile opened{blob(*package), blob_path(*package), std::move(name)};
    opened.layer = {package->sha256, {}};
    for (const Content& layer : layers) {
      for (const char* suffix : {kOwnSuffix, kBundleSuffix}) {
        if (layer.file != package->file + suffix) continue;
        if (!opened.layer->signatures.emplace(suffix, text_of(layer, kSmallFileBytes)).second) {
          refuse(path_, "has several signatures " + shown(layer.file));
        }
      }
    }
    return opened;
  }

 private:
  fs::path blob_path(const Content& content) const { return path_ / "blobs/sha256" / content.sha256; }

  Descriptor blob(const Content& content) const {
    const fs::path path = blob_path(content);
    Descriptor file = inside(blobs_, content.sha256.c_str(), path, 0);
    if (const uint64_t size = size_of(file, path); size != static_cast<uint64_t>(content.size)) {
      throw Error(errors::kDigestMismatch,
                  path.string() + " has " + std::to_string(size) + " bytes; its descriptor says " +
                      std::to_string(content.size),
                  "The copy is incomplete or damaged. Copy it again.");
    }
    return file;
  }

  std::string text_of(const Content& content, size_t most = kMaxBytes) const {
    std::string text = small_content(blob(content), blob_path(content), most);
    if (sha256_hex(text) == content.sha256) return text;
    throw Error(errors::kDigestMismatch, blob_path(content).string() + " has another digest than its name",
                "The copy is damaged. Copy it again.");
  }

  Content only_manifest() const {
    std::vector<Content> manifests;
    read_json(index_, path_ / "index.json", [&](JsonReader& json) {
      return std::map<std::string_view, std::function<void()>>{
          {"manifests", [&] { json.array([&] { manifests.push_back(content(json)); }); }}};
    });
    if (manifests.size() != 1) {
      throw Error(errors::kUsage, path_.string() + " has " + std::to_string(manifests.size()) + " manifests, not one",
                  "Copy one into a layout of its own: skopeo copy oci:DIR:NAME oci:NEW.");
    }
    if (manifests[0].media_type != kImageManifest) {
      refuse(path_, "has no manifest of an artifact, but " + shown(manifests[0].media_type));
    }
    return manifests[0];
  }

  std::vector<Content> layers_of(const Content& manifest) const {
    std::string kind;
    std::vector<Content> layers;
    read_json(text_of(manifest), blob_path(manifest), [&](JsonReader& json) {
      return std::map<std::string_view, std::function<void()>>{
          {"artifactType", [&] { kind = json.string(); }},
          {"layers", [&] { json.array([&] { layers.push_back(content(json)); }); }}};
    });
    if (kind != kModel) refuse(path_, "has an artifact of type " + shown(kind) + "; a package's is " + kModel);
    return layers;
  }

  fs::path path_;
  Descriptor blobs_;
  std::string index_;
};

OpenedFile only_package(const Descriptor& folder, const fs::path& path) {
  struct Close {
    void operator()(DIR* stream) const { closedir(stream); }
  };
  const std::unique_ptr<DIR, Close> entries(opendir(("/proc/self/fd/" + std::to_string(folder.get())).c_str()));
  if (!entries) throw FileError(path);
  std::vector<std::string> names;
  while (const dirent* entry = readdir(entries.get())) {
    if (std::string_view(entry->d_name).ends_with(".pt2")) names.emplace_back(entry->d_name);
  }
  if (names.size() != 1) {
    throw Error(errors::kUsage,
                path.string() + " is a folder with " + std::to_string(names.size()) + " .pt2 files, not one",
                names.empty() ? "Give a package, a folder with one, or an OCI image layout (`exportkit oci`)."
                              : "Give one of the files.");
  }
  const fs::path file = path / names[0];
  return {inside(folder, names[0].c_str(), file, 0), file, names[0]};
}

}  // namespace

OpenedFile open_in_folder(Descriptor folder, const fs::path& path) {
  struct stat status{};
  if (fstatat(folder.get(), "oci-layout", &status, AT_SYMLINK_NOFOLLOW) != 0) return only_package(folder, path);
  return ImageLayout(folder, path).package(fs::weakly_canonical(path).filename().string());
}

}  // namespace exportkit
