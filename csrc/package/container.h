// The bytes of a package: a zip archive with exactly one layout for given records.
//
// Records are stored uncompressed, in ZIP64 form. Each record's data start on a 64-byte boundary, as torch's writer
// does it, so that data can be mapped. There are no dates, comments or attributes, and no bytes before, between or
// after the parts. So the names, contents and order of the records determine the archive. The writer computes this
// layout and the reader compares with it. This refuses archives that two zip readers could read differently, and data
// hidden beside the records.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace exportkit {

inline constexpr uint64_t kAlignment = 64;
inline constexpr uint64_t kMaxDirectoryBytes = uint64_t{16} << 20;  // allocated before anything is checked

// An entry of the central directory, as read and not yet checked.
struct Header {
  std::string name;
  uint16_t flags, method;
  uint32_t crc32;
  uint64_t stored_size, size;
  uint32_t attributes;
  uint64_t offset;
};

// A record's place in an archive with a checked layout.
struct Entry {
  std::string name;
  uint64_t size;
  uint32_t crc32;
  uint64_t offset;       // of the local header
  uint64_t data_offset;  // of the content's first byte

  uint64_t end() const { return data_offset + size; }
};

// The place of a record whose local header starts at `offset`.
Entry laid_out(std::string name, uint64_t size, uint32_t crc32, uint64_t offset);
// The bytes before a record's data, padded so that the data start on an aligned offset.
std::string local_header(const Entry& entry);
// Everything after the last record: the central directory and its end records.
std::string central_directory(const std::vector<Entry>& entries);

// Reads the central directory of any zip archive, so that a wrong layout and a file that is not an archive give
// different errors: NotAnArchiveError, ArchiveLayoutError.
std::vector<Header> read_directory(int fd, uint64_t file_size);

// Compares the archive with the only allowed layout: ArchiveLayoutError. Reads headers, not the records' data.
std::vector<Entry> check_layout(int fd, uint64_t file_size, const std::vector<Header>& headers);

// Passes `size` bytes at `offset` to `sink` in blocks, or fewer at the end of the file.
void read_blocks(int fd, uint64_t offset, uint64_t size, const std::function<void(std::string_view)>& sink);

// Reads `size` bytes at `offset`, or fewer at the end of the file.
std::string read_at(int fd, uint64_t offset, uint64_t size);
size_t read_at(int fd, uint64_t offset, char* buffer, size_t size);

}  // namespace exportkit
