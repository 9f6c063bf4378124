#include "package/opened_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>
#include <vector>

#include "package/digests.h"
#include "package/errors.h"
#include "package/guarded.h"
#include "package/json_fields.h"
#include "package/text.h"

namespace exportkit {
namespace {

constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
constexpr size_t kPiece = size_t{1} << 20;
constexpr unsigned kNotExecutable = 8;  // MFD_NOEXEC_SEAL, which some hosts demand and Linux before 6.3 does not know
constexpr const char* kByFile = "Write the package to a file, and load that: weights of a file take no memory.";

std::string system_message(int error) { return std::generic_category().message(error); }

Descriptor new_memory() {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Descriptor file(memfd_create("exportkit-package", kFlags | kNotExecutable));
  if (!file && errno == EINVAL) file = Descriptor(memfd_create("exportkit-package", kFlags));
  if (!file)
    throw Error(errors::kHost, "memfd_create gives no memory for a package: " + system_message(errno), kByFile);
  return file;
}

std::string called(int descriptor) { return "descriptor " + std::to_string(descriptor); }

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "no file";
}

// What a descriptor is open on, which must be something that can be read.
mode_t readable_kind(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  struct stat status{};
  if (flags < 0 || fstat(descriptor, &status) != 0) {
    throw Error(errors::kUsage, called(descriptor) + " is not open: " + system_message(errno));
  }
  const char* const reason = (flags & O_PATH) != 0             ? "only names a file (O_PATH)"
                             : (flags & O_ACCMODE) == O_WRONLY ? "is open for writing only"
                             : (flags & O_DIRECT) != 0         ? "reads whole blocks of a disk only (O_DIRECT)"
                                                               : nullptr;
  if (reason != nullptr) throw Error(errors::kUsage, called(descriptor) + " " + reason, "Open the file with O_RDONLY.");
  return status.st_mode;
}

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
    if (found != static_cast<uintmax_t>(size)) mismatch(path, concat(found, " bytes; its descriptor says ", size));
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
  const bool is_digest = value.starts_with(kSha256) && is_hex(std::string_view(value).substr(kSha256.size()));
  if (!is_digest) json.fail("expected sha256: and 64 hexadecimal digits");
  return value.substr(kSha256.size());
}

// Reads a list of descriptors.
std::vector<Blob> blobs(JsonReader& json, const fs::path& folder) {
  std::vector<Blob> found;
  json.array([&] {
    Blob blob;
    read_known(json, {{"mediaType", [&] { blob.media_type = json.string(); }},
                      {"digest", [&] { blob.sha256 = digest(json); }},
                      {"size", [&] { blob.size = json.integer(); }},
                      {"annotations", [&] { read_known(json, {{kFilePath, [&] { blob.file = json.string(); }}}); }}});
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

bool is_sealed(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kSeals) == kSeals;
}

OpenedFile OpenedFile::by_path(const std::filesystem::path& path) {
  // Non-blocking, or a FIFO would wait for a writer.
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) throw Error(errors::kUsage, "cannot open " + path.string() + ": " + system_message(errno));
  struct stat status{};
  if (fstat(file.get(), &status) == 0 && S_ISDIR(status.st_mode)) return open_in_folder(path);
  return {std::move(file), path, path.filename().string()};
}

OpenedFile OpenedFile::of_file(int descriptor) {
  if (const mode_t mode = readable_kind(descriptor); !S_ISREG(mode)) {
    throw Error(errors::kNotAnArchive,
                called(descriptor) + " is open on " + kind_of(mode) + "; a package is one .pt2 file");
  }
  Descriptor own(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
  if (!own) throw FileError(called(descriptor));
  return {std::move(own), {}, called(descriptor)};
}

OpenedFile OpenedFile::of_descriptor(int descriptor, uint64_t stream_limit) {
  const mode_t mode = readable_kind(descriptor);
  if (!S_ISFIFO(mode) && !S_ISSOCK(mode)) return of_file(descriptor);
  ArrivingPackage arriving(called(descriptor), stream_limit);
  const auto piece = std::make_unique<char[]>(kPiece);
  while (true) {
    const ssize_t count = read(descriptor, piece.get(), kPiece);
    if (count == 0) return std::move(arriving).seal();
    if (count > 0) {
      arriving.write({piece.get(), static_cast<size_t>(count)});
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {  // the descriptor does not wait itself
      pollfd waiting{descriptor, POLLIN, 0};
      poll(&waiting, 1, -1);
    } else if (errno != EINTR) {
      throw FileError(called(descriptor));
    }
  }
}

OpenedFile OpenedFile::of_bytes(std::string_view bytes) {
  ArrivingPackage arriving(std::to_string(bytes.size()) + " bytes in memory", bytes.size());
  arriving.write(bytes);
  return std::move(arriving).seal();
}

ArrivingPackage::ArrivingPackage(std::string name, uint64_t limit)
    : name_(std::move(name)), limit_(limit), file_(new_memory()) {}

void ArrivingPackage::write(std::string_view piece) {
  if (piece.size() > limit_ - size_) {
    throw Error(errors::kUsage, name_ + " gave more than " + std::to_string(limit_) + " bytes, the limit of a stream",
                std::string("If the package is larger, set stream_limit higher. ") + kByFile);
  }
  while (!piece.empty()) {
    // By the system, which notices memory that is not there: the pages of a file that was cut short.
    const ssize_t count = ::write(file_.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EFAULT) {
      throw Error(errors::kUsage,
                  name_ + " cannot be read at byte " + std::to_string(size_) + ": there is no memory at its address",
                  "Memory of a file that is mapped goes when the file is cut short. Load the file instead.");
    }
    if (count < 0) throw FileError("memory for " + name_);
    piece.remove_prefix(static_cast<size_t>(count));
    size_ += static_cast<uint64_t>(count);
  }
}

OpenedFile ArrivingPackage::seal() && {
  if (fcntl(file_.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
    throw Error(errors::kHost, "the memory of " + name_ + " cannot be sealed: " + system_message(errno),
                "Another process may have it open, through /proc. Load it again.");
  }
  return {std::move(file_), {}, std::move(name_)};
}

OpenedFile open_in_folder(const fs::path& path) {
  if (fs::exists(fs::symlink_status(path / "oci-layout"))) return open_layout(path);
  std::vector<fs::path> packages;
  for (const std::string& name : names_in(path)) {
    const fs::path file = path / name;
    if (file.extension() == ".pt2" && !fs::is_directory(file)) packages.push_back(file);
  }
  if (packages.size() == 1) return OpenedFile::by_path(not_a_link(packages[0]));
  throw Error(errors::kUsage, concat(path.string(), " is a folder with ", packages.size(), " .pt2 files, not one"),
              packages.empty() ? "Give a package, a folder with one, or an OCI image layout (`exportkit oci`)."
                               : "Give one of the files.");
}

}  // namespace exportkit
