// bin/exportkit-run: starts the exportkit-run that was built for the torch beside exportkit. It links no torch itself.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

namespace {

// torch's minor version, such as "2.13", by the file that its Python package has; empty without it.
std::string torch_in(const std::filesystem::path& folder) {
  std::ifstream file(folder / "version.py");
  const std::string begin = "__version__ = '";
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(begin, 0) != 0) continue;
    const size_t dot = line.find('.', begin.size());
    const size_t end = dot == std::string::npos ? dot : line.find_first_not_of("0123456789", dot + 1);
    if (end != std::string::npos) return line.substr(begin.size(), end - begin.size());
  }
  return "";
}

}  // namespace

int main(int, char** argv) {
  std::error_code failed;
  const std::filesystem::path package =
      std::filesystem::read_symlink("/proc/self/exe", failed).parent_path().parent_path();
  const std::string beside = torch_in(package.parent_path() / "torch");
  const std::string version = beside.empty() ? EXPORTKIT_TORCH_VERSION : beside;
  const std::string program = package / "lib" / ("torch" + version) / "exportkit-run";
  execv(program.c_str(), argv);
  std::fprintf(stderr, "exportkit-run: there is no %s, which torch %s needs\n  hint: ", program.c_str(),
               version.c_str());
  std::fprintf(stderr, "`make build` builds it where that torch is installed.\n");
  return 4;  // HostError's
}
