// Writing a package: the one layout that its records have, whole or not at all.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "package/reader.h"

namespace exportkit {

// Takes the records of a package to be. What they are read from must be there until it is written.
class PackageWriter {
 public:
  using Sink = std::function<void(std::string_view)>;
  // Passes a record's content on in blocks.
  using Content = std::function<void(const Sink&)>;

  // Without the root folder. Those that torch adds to every archive are written as this format has them, whatever is
  // given for them. DuplicateRecordError: the manifest is no record.
  void add(const std::string& name, Content content);

  // Reads every content once: what the manifest must have for `records`, those that torch looks for among them.
  // UnsafeRecordNameError, DuplicateRecordError.
  std::vector<Record> records();

  // Writes the package; the same bytes for the same manifest and contents. The error of a rule that it would break;
  // ExportkitError where a content has changed since it was first read; FileError.
  void finish(const std::filesystem::path& path, const std::string& manifest);

 private:
  struct Measured {
    Record record;
    uint32_t crc32;
  };

  void measure();

  std::map<std::string, Content> contents_;  // by name
  std::vector<Measured> measured_;           // in the same order
};

// Content of a file; std::system_error names it.
PackageWriter::Content file_content(const std::filesystem::path& path);

}  // namespace exportkit
