// The package in a folder: an OCI image layout, or a folder with one .pt2, as a mounted image has it.
#pragma once

#include <filesystem>

#include "package/opened_file.h"

namespace exportkit {

// The suffixes of signature files: of our own form, and of OpenSSF model signing's bundles.
inline constexpr const char *kOwnSuffix = ".sig", *kBundleSuffix = ".sigstore.json";

// Opens the package in a folder. Nothing in the folder names another place: links are refused, and the names of blobs
// are their digests. FORMAT.md, "Folders", has the rules.
//
// UsageError: there is no package, or more than one. ArtifactError: the layout breaks a rule. DigestMismatchError: a
// blob is not what its descriptor says; the package's own digest is checked with those of its records.
OpenedFile open_in_folder(const std::filesystem::path& path);

}  // namespace exportkit
