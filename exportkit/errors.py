"""The error classes. Each message says what was given, what is allowed and what to do next.

Each class also carries the exit code of the command line.
"""

from __future__ import annotations

from collections.abc import Mapping

# By exit code of the command line, what it means; the table of --help and of docs/cli.md.
EXIT_CODES: Mapping[int, str] = {
    0: "success",
    1: "a check failed: an output's values differ, or an operator breaks the contract",
    2: "wrong usage: an argument is invalid, or MODEL cannot be found",
    3: "the package is bad, tampered with, incomplete, or not trusted: a signature or --trust is missing",
    4: "this machine cannot do it: no compiler, no CUDA, another torch, or no target that runs here",
    5: "refused: the model cannot be exported as it is",
    6: "serve: a GPU is broken for this process, and a new process can use it",
    10: "verify: an output has the wrong dtype",
    11: "verify: an output has the wrong shape, or the result the wrong structure",
    12: "verify: the packaged model raised an error",
    13: "verify: the process of the packaged model or of eager crashed",
    14: "verify: the packaged model or eager did not answer in time",
    15: "verify: an operator is missing",
    16: "verify --against eager: the eager model cannot be made here, or the inputs of all sizes are too large",
    17: "verify: the eager model has other weights than when it was exported",
    18: "verify: eager itself fails, at a size inside the exported range or when it is made",
    19: "verify: sessions are not independent, or fork, reset or a saved state does not give what it must",
    20: "verify: an output is not the gradient that it is declared to be",
    21: "verify: an output cannot be judged: eager moves by as much when it rounds otherwise; the others agree",
    70: "a bug in exportkit; stderr has a traceback",
    130: "interrupted",
}


class ExportkitError(Exception):
    """Base class of every error that exportkit raises on purpose.

    Args:
        message: Says what was given and what is allowed.
        hint: Says what to do next; optional.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  {hint}")
        self.message = message
        self.hint = hint


# --- what the caller gave (2) -----------------------------------------------------------------------------------------


class UsageError(ExportkitError):
    """An argument is invalid: a bad name, a bad number, or options that exclude each other."""

    exit_code = 2


class ModelNotFoundError(UsageError):
    """MODEL cannot be imported, or it is not a model."""


class InputError(UsageError):
    """The inputs of a call do not fit the model or its package."""


class WeightsError(UsageError):
    """A weights file does not fit the model."""


class StateError(UsageError):
    """A session's saved state does not fit the session, or is damaged."""


class NotAnOperatorLibraryError(UsageError):
    """A file is not an operator library: it is not a shared library, or it registers no operator."""


class MergeError(UsageError):
    """The artifacts come from different models."""


# --- what was refused (5) ---------------------------------------------------------------------------------------------


class ExportError(ExportkitError):
    """The model cannot be exported: its code, torch.export or the compiler raised an error."""

    exit_code = 5


class CompilationError(ExportError):
    """AOTInductor refused the program, or wrote code that does not compile."""


class OperatorNotExportableError(ExportError):
    """The graph calls a custom operator that has no fake kernel, or that exists in Python only."""


class MissingOperatorError(ExportError):
    """Code uses an operator that no loaded library defines."""


# --- a check or a step that failed (1) --------------------------------------------------------------------------------


class WrongResultError(ExportkitError):
    """A model answers a recorded case wrongly, or a benchmarked alternative differs from the reference."""


class SigningError(ExportkitError):
    """A command that should sign failed, or its answer is not a signature by the given key."""


class ModelRunError(ExportkitError):
    """Compiled code, or an operator it called, failed on valid inputs."""


class RefusedValueError(ModelRunError):
    """A value that eager refuses, too: an index out of range, an integer divided by zero, an assertion of the model's.

    On a GPU it may be of an earlier call on the same stream, or in the same session.
    """


class ModelClosedError(ExportkitError):
    """A loaded model was used after close()."""


class SessionBusyError(ExportkitError):
    """A session was called while another call of it was running. A session has one caller at a time."""


class SessionBrokenError(ExportkitError):
    """A call of the session failed midway, so its state may be half written."""


class SessionClosedError(ExportkitError):
    """A session was used after close()."""


# --- the package is bad (3) -------------------------------------------------------------------------------------------


class PackageError(ExportkitError):
    """A package breaks a rule of FORMAT.md. Each rule has one subclass."""

    exit_code = 3


class NotAnArchiveError(PackageError):
    """The file is not a readable zip archive; it may be truncated."""


class NoManifestError(PackageError):
    """The archive has no exportkit/manifest.json. It may be a .pt2 that exportkit did not write."""


class UntrustedProgramError(PackageError):
    """A file of torch.export.save was given without `--trust`. Reading it would run what its author wrote."""


class ArchiveLayoutError(PackageError):
    """The records have more than one root directory, or a record is compressed, encrypted or not a plain file."""


class StockRecordError(PackageError):
    """One of the four records that torch's reader needs is missing or has the wrong content."""


class DuplicateRecordError(PackageError):
    """Two records have the same name."""


class UnsafeRecordNameError(PackageError):
    """A record's name is absolute, contains `..`, or is not a plain POSIX path."""


class ManifestTooLargeError(PackageError):
    """The manifest is larger than the format allows. It is not parsed."""


class ManifestSyntaxError(PackageError):
    """The manifest is not JSON, or its keys or values do not follow FORMAT.md."""


class FormatVersionError(PackageError):
    """This exportkit does not read the manifest's format version."""


class ManifestConsistencyError(PackageError):
    """The manifest contradicts itself, for example by naming a target, library, dimension or record that is missing."""


class MissingRecordError(PackageError):
    """A record that the manifest lists is not in the archive."""


class UnlistedRecordError(PackageError):
    """The archive holds a record that the manifest does not list."""


class DigestMismatchError(PackageError):
    """A record's size or sha256 is not what the manifest says."""


class MissingLibraryError(PackageError):
    """No library of the package defines an operator that the graph calls."""


class SchemaChangedError(PackageError):
    """A loaded operator's schema differs from the manifest."""


class LibraryConflictError(PackageError):
    """Another build of the same operator namespace is already loaded in this process."""


class LibraryLoadError(PackageError):
    """The dynamic linker refused an operator library."""


class SignatureMissingError(PackageError):
    """The package has no signature by any of the given keys."""


class SignatureError(PackageError):
    """A signature is invalid: it was changed, it belongs to another package, or its file cannot be read."""


class RevokedError(PackageError):
    """A revocation list of this machine's policies names the package, or the keys that signed it."""


class OnnxFileError(PackageError):
    """A file of an ONNX model is missing, or it is not the one that the model's sidecar describes."""


class ArtifactError(PackageError):
    """A folder is an OCI image layout, but not one of a package, or it breaks the specification."""


class CaseError(PackageError):
    """A recorded case does not fit the manifest's inputs and outputs."""


# --- this machine (4) -------------------------------------------------------------------------------------------------


class HostError(ExportkitError):
    """This machine cannot do what was asked."""

    exit_code = 4


class NoTargetError(HostError):
    """No target of the package runs on this machine. The message gives a reason for each target."""


class TorchVersionError(HostError):
    """The package, or a library in it, does not work with the installed torch."""


class ModelLoadError(HostError):
    """torch's loader refused an intact target, or ONNX Runtime an intact model."""


class CacheError(HostError):
    """Neither the cache nor a temporary directory can hold the unpacked package."""


class PolicyError(HostError):
    """This machine's signature policy cannot be read, or other users may change it. Nothing is loaded."""


class CompilerError(HostError):
    """No C++ compiler works, or its output does not load."""
