// What holds of a package's records as such: their names, their order, those that torch looks for (rules 3, 4, 10-12).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "package/container.h"
#include "package/manifest.h"

namespace exportkit {

// torch takes the folder of the first record for the archive's root. It is the same in every package: torch's own
// writer uses the file's name, so that the same package under another name would have other bytes.
inline constexpr std::string_view kRoot = "package/";

// What torch's writer adds to every archive and its readers look for. `.data/version` is that of the zip layout, not of
// the package; torch reads 1 to 10.
struct StockRecord {
  std::string_view name, content, text;
};
inline constexpr StockRecord kStockRecords[] = {{".data/version", "6\n", "6\\n"},
                                                {"archive_format", "pt2", "pt2"},
                                                {"archive_version", "0", "0"},
                                                {"byteorder", "little", "little"}};

// Every name is safe to extract under a folder, is there once, and lies under the root: UnsafeRecordNameError,
// DuplicateRecordError, ArchiveLayoutError.
void check_record_names(const std::vector<std::string_view>& names);

// The manifest comes first, and then the records sorted by name: ArchiveLayoutError. Names are without the root.
void check_record_order(const std::vector<Entry>& entries);

// The manifest lists just the records of the archive, both sorted, with their sizes: MissingRecordError,
// UnlistedRecordError, DigestMismatchError, StockRecordError.
void check_listed(const std::vector<Record>& listed, std::span<const Entry> entries);

}  // namespace exportkit
