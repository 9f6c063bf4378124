// Writes a package atomically, in the only layout that its records can have.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "package/reader.h"

namespace exportkit {

// Collects a package's records. Their sources must exist until the package is written.
class PackageWriter {
 public:
  using Sink = std::function<void(std::string_view)>;
  // Passes a record's content to `sink` in blocks.
  using Content = std::function<void(const Sink&)>;

  // Adds a record; `name` lacks the root folder. The records that torch adds to every archive get this format's
  // content, not the given one. DuplicateRecordError: the name is the manifest's.
  void add(const std::string& name, Content content);

  // Reads every content once and returns the manifest's `records`, including the records that torch looks for.
  // UnsafeRecordNameError, DuplicateRecordError.
  std::vector<Record> records();

  // Writes the package: the same bytes for the same manifest and contents. Throws the error of a rule that the package
  // would break; ExportkitError if a content changed since `records()` read it; FileError.
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

// The content of a file. Errors are std::system_error and name the file.
PackageWriter::Content file_content(const std::filesystem::path& path);

}  // namespace exportkit
