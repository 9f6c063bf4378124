// The bytes of a package: a zip archive with exactly one layout for given records. exportkit/package/container.py has
// the reasons; this is the reader's half of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace exportkit {

inline constexpr uint64_t kAlignment = 64;
inline constexpr uint64_t kMaxDirectoryBytes = uint64_t{16} << 20;  // allocated before anything is checked

// An entry of the central directory as some writer made it; nothing in it is to be trusted yet.
struct Header {
  std::string name;
  uint16_t flags, method;
  uint32_t crc32;
  uint64_t stored_size, size;
  uint32_t attributes;
  uint64_t offset;
};

// A record's place in an archive whose layout holds.
struct Entry {
  std::string name;
  uint64_t size;
  uint32_t crc32;
  uint64_t offset;       // of its local header
  uint64_t data_offset;  // of its first byte

  uint64_t end() const { return data_offset + size; }
};

// The central directory of any zip archive, so that a wrong one can be told from none: NotAnArchiveError,
// ArchiveLayoutError.
std::vector<Header> read_directory(int fd, uint64_t file_size);

// Compares the archive with the one layout it can have: ArchiveLayoutError. Only headers are read, no record's data.
std::vector<Entry> check_layout(int fd, uint64_t file_size, const std::vector<Header>& headers);

// `size` bytes at `offset`, fewer at the end of the file.
std::string read_at(int fd, uint64_t offset, uint64_t size);
size_t read_at(int fd, uint64_t offset, char* buffer, size_t size);

}  // namespace exportkit
