// The bytes of a package: a zip archive with exactly one layout for given records.
//
// A package is stored, not compressed, in ZIP64 form throughout, each record's data on a 64-byte boundary (as torch's
// own writer puts it, so that data can be mapped), no dates, no comments, no attributes, nothing before, between or
// after. So the archive is a function of its records' names, contents and order. The writer computes that function and
// the reader compares with it: what two zip readers could understand in two ways, and what could hide beside the
// records, is not that layout, and is refused.
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

// A record's place at an offset, which its local header gets.
Entry laid_out(std::string name, uint64_t size, uint32_t crc32, uint64_t offset);
// What precedes its data, padded so that they start on an aligned offset.
std::string local_header(const Entry& entry);
// Everything after the last record: the central directory and its end.
std::string central_directory(const std::vector<Entry>& entries);

// The central directory of any zip archive, so that a wrong one can be told from none: NotAnArchiveError,
// ArchiveLayoutError.
std::vector<Header> read_directory(int fd, uint64_t file_size);

// Compares the archive with the one layout it can have: ArchiveLayoutError. Only headers are read, no record's data.
std::vector<Entry> check_layout(int fd, uint64_t file_size, const std::vector<Header>& headers);

// `size` bytes at `offset`, fewer at the end of the file.
std::string read_at(int fd, uint64_t offset, uint64_t size);
size_t read_at(int fd, uint64_t offset, char* buffer, size_t size);

}  // namespace exportkit
