#include "package/container.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <system_error>

#include "package/errors.h"
#include "package/text.h"

namespace exportkit {

namespace {

// https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT has the fields.
constexpr size_t kLocalBytes = 30, kSizesBytes = 20, kFieldBytes = 4;  // of a local header, without its name
constexpr size_t kCentralBytes = 46, kEnd64Bytes = 56, kLocatorBytes = 20, kEndBytes = 22;
constexpr size_t kTailBytes = kEnd64Bytes + kLocatorBytes + kEndBytes;
constexpr uint32_t kLocalSignature = 0x04034B50, kCentralSignature = 0x02014B50, kEnd64Signature = 0x06064B50,
                   kLocatorSignature = 0x07064B50, kEndSignature = 0x06054B50;
constexpr uint16_t kVersion = 45;  // "needed to extract": ZIP64
constexpr uint16_t kDate = 0x21;   // 1980-01-01, the first date zip can express
constexpr uint16_t kEncrypted = 0x0041;
constexpr uint32_t kMax32 = 0xFFFFFFFF;

template <class T>
T load(std::string_view bytes, size_t at) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= uint64_t{static_cast<uint8_t>(bytes[at + i])} << (8 * i);
  return static_cast<T>(value);
}

template <class... T>
void append(std::string& out, T... values) {
  const auto one = [&out](auto value) {
    for (size_t i = 0; i < sizeof(value); ++i) out += static_cast<char>(uint64_t{value} >> (8 * i) & 0xFF);
  };
  (one(values), ...);
}

[[noreturn]] void bad_layout(const std::string& message, const std::string& hint = {}) {
  throw Error(errors::kArchiveLayout, message, hint);
}

// --- any zip archive -----------------------------------------------------------------------------------------------

// Replaces the fields that did not fit in 32 bits by the values of the ZIP64 extra field, in this order. False if that
// field is cut short.
bool widen(std::string_view extra, uint64_t& size, uint64_t& stored_size, uint64_t& offset) {
  if (size != kMax32 && stored_size != kMax32 && offset != kMax32) return true;
  for (size_t at = 0, length = 0; at + 4 <= extra.size(); at += 4 + length) {
    length = load<uint16_t>(extra, at + 2);
    if (load<uint16_t>(extra, at) != 1) continue;
    std::string_view wide = extra.substr(at + 4, length / 8 * 8);
    if (wide.size() % 8 != 0) return false;
    for (uint64_t* field : {&size, &stored_size, &offset}) {
      if (*field != kMax32 || wide.empty()) continue;
      *field = load<uint64_t>(wide, 0);
      wide.remove_prefix(8);
    }
    return true;
  }
  return true;
}

// Reads the entry at `at` and moves `at` to the next one. check_layout finds anything unusual.
Header parse_central(std::string_view block, size_t number, size_t& at) {
  const auto require = [&](bool holds, const char* what) {
    if (holds) return;
    throw Error(errors::kNotAnArchive, concat("entry ", number, " of the central directory is damaged: ", what));
  };
  require(block.size() - at >= kCentralBytes, "it reaches beyond the directory");
  require(load<uint32_t>(block, at) == kCentralSignature, "it does not start with an entry's signature");
  const size_t name_length = load<uint16_t>(block, at + 28), extra_length = load<uint16_t>(block, at + 30),
               comment_length = load<uint16_t>(block, at + 32);
  require(block.size() - at - kCentralBytes >= name_length + extra_length + comment_length,
          "it reaches beyond the directory");
  Header header{};
  header.flags = load<uint16_t>(block, at + 8);
  header.method = load<uint16_t>(block, at + 10);
  header.crc32 = load<uint32_t>(block, at + 16);
  header.stored_size = load<uint32_t>(block, at + 20);
  header.size = load<uint32_t>(block, at + 24);
  header.attributes = load<uint32_t>(block, at + 38);
  header.offset = load<uint32_t>(block, at + 42);
  header.name = block.substr(at + kCentralBytes, name_length);
  require(is_utf8(header.name), "its name is not UTF-8");
  const std::string_view extra = block.substr(at + kCentralBytes + name_length, extra_length);
  require(widen(extra, header.size, header.stored_size, header.offset), "its ZIP64 field is cut short");
  at += kCentralBytes + name_length + extra_length + comment_length;
  return header;
}

void refuse_named_oddities(const Header& header) {
  const std::string what = "record " + header.name;
  if (header.flags & kEncrypted) bad_layout(what + " is encrypted; a package stores its records unencrypted");
  if (header.method != 0 || header.stored_size != header.size) {
    bad_layout(concat(what, " is compressed (method ", header.method, ", ", header.stored_size, " bytes for ",
                      header.size, "); a package stores its records uncompressed"));
  }
  if (header.attributes != 0) {
    bad_layout(what + " has file attributes, like a link or a device; a package has plain records only");
  }
}

}  // namespace

Entry laid_out(std::string name, uint64_t size, uint32_t crc32, uint64_t offset) {
  constexpr size_t kHeaderBytes = kLocalBytes + kSizesBytes + kFieldBytes;
  const uint64_t start = offset + kHeaderBytes + name.size();
  return {std::move(name), size, crc32, offset, start + (kAlignment - start % kAlignment) % kAlignment};
}

std::string local_header(const Entry& entry) {
  const auto gap = static_cast<uint16_t>(entry.data_offset - entry.offset - kLocalBytes - kSizesBytes - kFieldBytes -
                                         entry.name.size());
  std::string out;
  append(out, kLocalSignature, kVersion, uint16_t{0}, uint16_t{0}, uint16_t{0}, kDate, entry.crc32, kMax32, kMax32,
         static_cast<uint16_t>(entry.name.size()), static_cast<uint16_t>(kSizesBytes + kFieldBytes + gap));
  out += entry.name;
  append(out, uint16_t{1}, uint16_t{16}, entry.size, entry.size);
  out += "FB";  // torch's own padding field
  append(out, gap);
  return out.append(gap, 'Z');
}

std::string central_directory(const std::vector<Entry>& entries) {
  const uint64_t start = entries.empty() ? 0 : entries.back().end(), count = entries.size();
  std::string out;
  for (const Entry& entry : entries) {
    append(out, kCentralSignature, kVersion, kVersion, uint16_t{0}, uint16_t{0}, uint16_t{0}, kDate, entry.crc32,
           kMax32, kMax32, static_cast<uint16_t>(entry.name.size()), uint16_t{28}, uint16_t{0}, uint16_t{0},
           uint16_t{0}, uint32_t{0}, kMax32);
    out += entry.name;
    append(out, uint16_t{1}, uint16_t{24}, entry.size, entry.size, entry.offset);
  }
  const uint64_t length = out.size();
  append(out, kEnd64Signature, uint64_t{kEnd64Bytes - 12}, kVersion, kVersion, uint32_t{0}, uint32_t{0}, count, count,
         length, start);
  append(out, kLocatorSignature, uint32_t{0}, start + length, uint32_t{1});
  append(out, kEndSignature, uint16_t{0}, uint16_t{0}, uint16_t{0xFFFF}, uint16_t{0xFFFF}, kMax32, kMax32, uint16_t{0});
  return out;
}

size_t read_at(int fd, uint64_t offset, char* buffer, size_t size) {
  size_t done = 0;
  while (done < size) {
    const ssize_t count = pread(fd, buffer + done, size - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw std::system_error(errno, std::generic_category(), "cannot read the package");
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

std::string read_at(int fd, uint64_t offset, uint64_t size) {
  std::string out(size, '\0');
  out.resize(read_at(fd, offset, out.data(), out.size()));
  return out;
}

void read_blocks(int fd, uint64_t offset, uint64_t size, const std::function<void(std::string_view)>& sink) {
  constexpr uint64_t kBlock = 256 << 10;  // stays in a core's own cache while it is hashed
  const auto buffer = std::make_unique<char[]>(std::min(kBlock, size));
  for (uint64_t at = 0; at < size;) {
    const size_t count = read_at(fd, offset + at, buffer.get(), std::min(kBlock, size - at));
    if (count == 0) return;
    sink({buffer.get(), count});
    at += count;
  }
}

std::vector<Header> read_directory(int fd, uint64_t file_size) {
  const uint64_t tail_size = std::min<uint64_t>(kTailBytes, file_size);
  const std::string bytes = read_at(fd, file_size - tail_size, tail_size);
  const std::string_view tail = bytes;
  if (tail.size() < kEndBytes || load<uint32_t>(tail, tail.size() - kEndBytes) != kEndSignature) {
    throw Error(errors::kNotAnArchive,
                concat("the file (", file_size,
                       " bytes) does not end like a zip archive: it was cut short, something "
                       "was appended to it, or it is not an archive"),
                "Give a .pt2 that exportkit wrote; if this is one, copy it again.");
  }
  const std::string_view end = tail.substr(tail.size() - kEndBytes);
  uint64_t count = load<uint16_t>(end, 10), length = load<uint32_t>(end, 12), start = load<uint32_t>(end, 16);
  if (tail.size() == kTailBytes && load<uint32_t>(tail, 0) == kEnd64Signature &&
      load<uint32_t>(tail, kEnd64Bytes) == kLocatorSignature) {
    count = load<uint64_t>(tail, 32), length = load<uint64_t>(tail, 40), start = load<uint64_t>(tail, 48);
  }
  if (length > kMaxDirectoryBytes) {
    bad_layout(concat("the central directory has ", length, " bytes; a package has at most ", kMaxDirectoryBytes));
  }
  if (start > file_size || length > file_size - start) {
    throw Error(errors::kNotAnArchive, concat("the central directory should lie at byte ", start, " and have ", length,
                                              " bytes, but the file has ", file_size));
  }
  const std::string block = read_at(fd, start, length);
  std::vector<Header> headers;
  size_t at = 0;
  while (headers.size() < count) headers.push_back(parse_central(block, headers.size(), at));
  return headers;
}

std::vector<Entry> check_layout(int fd, uint64_t file_size, const std::vector<Header>& headers) {
  std::vector<Entry> entries;
  entries.reserve(headers.size());
  uint64_t offset = 0;
  for (const Header& header : headers) {
    refuse_named_oddities(header);
    if (header.offset != offset) {
      bad_layout(concat("record ", header.name, " starts at byte ", header.offset, ", not ", offset,
                        " where the previous record ends: records overlap, or bytes are hidden between them"));
    }
    const Entry entry = laid_out(header.name, header.size, header.crc32, offset);
    if (entry.data_offset > file_size || header.size > file_size - entry.data_offset) {
      bad_layout(concat("record ", header.name, " has ", header.size, " bytes from byte ", entry.data_offset,
                        ", but the file has ", file_size));
    }
    if (const std::string expected = local_header(entry); read_at(fd, offset, expected.size()) != expected) {
      bad_layout("the local header of record " + header.name + " disagrees with the central directory",
                 "Two zip readers could read two different records; pack it again with `exportkit package`.");
    }
    entries.push_back(entry);
    offset = entries.back().end();
  }
  const std::string expected = central_directory(entries);
  if (file_size - offset != expected.size() || read_at(fd, offset, expected.size()) != expected) {
    bad_layout(concat("the bytes after the last record (from byte ", offset, " of ", file_size,
                      ") are not the central directory of a package with these records: they hold a comment, extra "
                      "fields, dates or hidden bytes"),
               "Other zip tools write such archives; pack it again with `exportkit package`.");
  }
  return entries;
}

}  // namespace exportkit
