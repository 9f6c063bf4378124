// Checks the records' names and order, and the records that torch looks for (rules 3, 4, 10-12).
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "package/container.h"
#include "package/manifest.h"

namespace exportkit {

// torch takes the first record's folder for the archive's root. Every package has the same root, so that its bytes do
// not depend on the file's name, which torch's writer uses as the root.
inline constexpr std::string_view kRoot = "package/";

// Records that torch's writer adds to every archive and its readers look for. `.data/version` is the version of the zip
// layout, not of the package; torch reads 1 to 10.
struct StockRecord {
  std::string_view name, content, text;
};
inline constexpr StockRecord kStockRecords[] = {{".data/version", "6\n", "6\\n"},
                                                {"archive_format", "pt2", "pt2"},
                                                {"archive_version", "0", "0"},
                                                {"byteorder", "little", "little"}};

// Checks that every name is unique, lies under the root and can be extracted safely: UnsafeRecordNameError,
// DuplicateRecordError, ArchiveLayoutError.
void check_record_names(const std::vector<std::string_view>& names);

// Checks that the manifest comes first, then the records sorted by name: ArchiveLayoutError. Names lack the root.
void check_record_order(const std::vector<Entry>& entries);

// Checks that the manifest lists exactly the archive's records with their sizes. Both lists are sorted.
// MissingRecordError, UnlistedRecordError, DigestMismatchError, StockRecordError.
void check_listed(const std::vector<Record>& listed, std::span<const Entry> entries);

}  // namespace exportkit
