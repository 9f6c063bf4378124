// The error classes of exportkit/errors.py, with the same names and exit codes, and with the C interface's codes.
#pragma once

#include <stdexcept>
#include <string>

namespace exportkit {

struct ErrorClass {
  const char* name;
  int code;  // as codes.h of the C interface has it

  // 1 a step failed, 2 wrong usage, 3 bad package, 4 this machine cannot do it.
  constexpr int exit_code() const { return code / 100; }
};

// Tests compare this list with exportkit/errors.py and with codes.h.
namespace errors {
inline constexpr ErrorClass kUsage{"UsageError", 200};
inline constexpr ErrorClass kInput{"InputError", 201};
inline constexpr ErrorClass kWeights{"WeightsError", 202};
inline constexpr ErrorClass kState{"StateError", 203};
inline constexpr ErrorClass kExportkit{"ExportkitError", 100};
inline constexpr ErrorClass kWrongResult{"WrongResultError", 101};
inline constexpr ErrorClass kModelRun{"ModelRunError", 102};
inline constexpr ErrorClass kRefusedValue{"RefusedValueError", 107};
inline constexpr ErrorClass kModelClosed{"ModelClosedError", 103};
inline constexpr ErrorClass kSessionBusy{"SessionBusyError", 104};
inline constexpr ErrorClass kSessionBroken{"SessionBrokenError", 105};
inline constexpr ErrorClass kSessionClosed{"SessionClosedError", 106};
inline constexpr ErrorClass kNotAnArchive{"NotAnArchiveError", 301};
inline constexpr ErrorClass kNoManifest{"NoManifestError", 302};
inline constexpr ErrorClass kArchiveLayout{"ArchiveLayoutError", 303};
inline constexpr ErrorClass kStockRecord{"StockRecordError", 304};
inline constexpr ErrorClass kDuplicateRecord{"DuplicateRecordError", 305};
inline constexpr ErrorClass kUnsafeRecordName{"UnsafeRecordNameError", 306};
inline constexpr ErrorClass kManifestTooLarge{"ManifestTooLargeError", 307};
inline constexpr ErrorClass kManifestSyntax{"ManifestSyntaxError", 308};
inline constexpr ErrorClass kFormatVersion{"FormatVersionError", 309};
inline constexpr ErrorClass kManifestConsistency{"ManifestConsistencyError", 310};
inline constexpr ErrorClass kMissingRecord{"MissingRecordError", 311};
inline constexpr ErrorClass kUnlistedRecord{"UnlistedRecordError", 312};
inline constexpr ErrorClass kDigestMismatch{"DigestMismatchError", 313};
inline constexpr ErrorClass kMissingLibrary{"MissingLibraryError", 314};
inline constexpr ErrorClass kSchemaChanged{"SchemaChangedError", 315};
inline constexpr ErrorClass kLibraryConflict{"LibraryConflictError", 316};
inline constexpr ErrorClass kLibraryLoad{"LibraryLoadError", 317};
inline constexpr ErrorClass kSignatureMissing{"SignatureMissingError", 318};
inline constexpr ErrorClass kSignature{"SignatureError", 319};
inline constexpr ErrorClass kRevoked{"RevokedError", 321};
inline constexpr ErrorClass kArtifact{"ArtifactError", 322};
inline constexpr ErrorClass kCase{"CaseError", 320};
inline constexpr ErrorClass kHost{"HostError", 400};
inline constexpr ErrorClass kNoTarget{"NoTargetError", 401};
inline constexpr ErrorClass kTorchVersion{"TorchVersionError", 402};
inline constexpr ErrorClass kModelLoad{"ModelLoadError", 403};
inline constexpr ErrorClass kCache{"CacheError", 404};
inline constexpr ErrorClass kPolicy{"PolicyError", 405};
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
  int exit_code() const { return kind_.exit_code(); }
  // What was given and what is allowed.
  const std::string& message() const { return message_; }
  // What to do next; empty if the message says it.
  const std::string& hint() const { return hint_; }

 private:
  ErrorClass kind_;
  std::string message_, hint_;
};

}  // namespace exportkit
