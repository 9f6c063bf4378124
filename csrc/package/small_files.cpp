#include "package/small_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "package/atomic.h"
#include "package/container.h"
#include "package/errors.h"
#include "package/guarded.h"
#include "package/json.h"

namespace exportkit {
namespace {

void check_guarded(const std::filesystem::path& path, const struct stat& status) {
  if (const char* reason = others_may_change(status)) throw std::invalid_argument(reason);
  if (const std::string reason = follow(path).reason; !reason.empty()) throw std::invalid_argument(reason);
}

}  // namespace

std::optional<std::string> read_limited(const std::filesystem::path& path, bool guarded, size_t most) {
  // Non-blocking, or a FIFO would wait for a writer.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  struct stat status{};
  if (!file || fstat(file.get(), &status) != 0) throw FileError(path);
  if (!S_ISREG(status.st_mode)) throw std::invalid_argument("is not a plain file");
  if (guarded) check_guarded(path, status);
  std::string content = read_at(file.get(), 0, most + 1);
  if (content.size() > most) throw std::invalid_argument("has more than " + std::to_string(most) + " bytes");
  return content;
}

std::string file_problem() {
  try {
    throw;
  } catch (const std::system_error& error) {
    return "cannot be read: " + error.code().message();
  } catch (const JsonError& error) {
    return std::string("does not follow FORMAT.md: ") + error.what();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

std::optional<std::string> read_signature_file(const std::filesystem::path& file) {
  try {
    return read_limited(file);
  } catch (const std::system_error& error) {
    throw Error(errors::kUsage, "cannot read the signature file " + file.string() + ": " + error.code().message());
  } catch (const std::invalid_argument& error) {
    throw Error(errors::kSignature, "the signature file " + file.filename().string() + " " + error.what());
  }
}

}  // namespace exportkit
