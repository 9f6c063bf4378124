// The error classes of exportkit/errors.py, with the same names and exit codes.
#pragma once

#include <stdexcept>
#include <string>

namespace exportkit {

struct ErrorClass {
  const char* name;
  int exit_code;  // 1 a step failed, 2 wrong usage, 3 bad package, 4 this machine cannot do it
};

// A test compares this list with exportkit/errors.py.
namespace errors {
inline constexpr ErrorClass kUsage{"UsageError", 2};
inline constexpr ErrorClass kInput{"InputError", 2};
inline constexpr ErrorClass kWeights{"WeightsError", 2};
inline constexpr ErrorClass kState{"StateError", 2};
inline constexpr ErrorClass kExportkit{"ExportkitError", 1};
inline constexpr ErrorClass kWrongResult{"WrongResultError", 1};
inline constexpr ErrorClass kModelRun{"ModelRunError", 1};
inline constexpr ErrorClass kRefusedValue{"RefusedValueError", 1};
inline constexpr ErrorClass kModelClosed{"ModelClosedError", 1};
inline constexpr ErrorClass kSessionBusy{"SessionBusyError", 1};
inline constexpr ErrorClass kSessionBroken{"SessionBrokenError", 1};
inline constexpr ErrorClass kSessionClosed{"SessionClosedError", 1};
inline constexpr ErrorClass kNotAnArchive{"NotAnArchiveError", 3};
inline constexpr ErrorClass kNoManifest{"NoManifestError", 3};
inline constexpr ErrorClass kArchiveLayout{"ArchiveLayoutError", 3};
inline constexpr ErrorClass kStockRecord{"StockRecordError", 3};
inline constexpr ErrorClass kDuplicateRecord{"DuplicateRecordError", 3};
inline constexpr ErrorClass kUnsafeRecordName{"UnsafeRecordNameError", 3};
inline constexpr ErrorClass kManifestTooLarge{"ManifestTooLargeError", 3};
inline constexpr ErrorClass kManifestSyntax{"ManifestSyntaxError", 3};
inline constexpr ErrorClass kFormatVersion{"FormatVersionError", 3};
inline constexpr ErrorClass kManifestConsistency{"ManifestConsistencyError", 3};
inline constexpr ErrorClass kMissingRecord{"MissingRecordError", 3};
inline constexpr ErrorClass kUnlistedRecord{"UnlistedRecordError", 3};
inline constexpr ErrorClass kDigestMismatch{"DigestMismatchError", 3};
inline constexpr ErrorClass kMissingLibrary{"MissingLibraryError", 3};
inline constexpr ErrorClass kSchemaChanged{"SchemaChangedError", 3};
inline constexpr ErrorClass kLibraryConflict{"LibraryConflictError", 3};
inline constexpr ErrorClass kLibraryLoad{"LibraryLoadError", 3};
inline constexpr ErrorClass kSignatureMissing{"SignatureMissingError", 3};
inline constexpr ErrorClass kSignature{"SignatureError", 3};
inline constexpr ErrorClass kRevoked{"RevokedError", 3};
inline constexpr ErrorClass kArtifact{"ArtifactError", 3};
inline constexpr ErrorClass kCase{"CaseError", 3};
inline constexpr ErrorClass kHost{"HostError", 4};
inline constexpr ErrorClass kNoTarget{"NoTargetError", 4};
inline constexpr ErrorClass kTorchVersion{"TorchVersionError", 4};
inline constexpr ErrorClass kModelLoad{"ModelLoadError", 4};
inline constexpr ErrorClass kCache{"CacheError", 4};
inline constexpr ErrorClass kPolicy{"PolicyError", 4};
}  // namespace errors

// Every deliberate error. what() is the message, followed by the hint on a separate line.
class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  Error(ErrorClass kind, std::string message, std::string hint = {})
      : std::runtime_error(hint.empty() ? message : message + "\n  " + hint),
        kind_(kind),
        message_(std::move(message)),
        hint_(std::move(hint)) {}

  const ErrorClass& kind() const { return kind_; }
  const char* name() const { return kind_.name; }
  int exit_code() const { return kind_.exit_code; }
  // What was given and what is allowed.
  const std::string& message() const { return message_; }
  // What to do next; empty if the message says it.
  const std::string& hint() const { return hint_; }

 private:
  ErrorClass kind_;
  std::string message_, hint_;
};

}  // namespace exportkit
