"""The error classes. Each says what was given, what is allowed and what to do next, and carries the CLI's exit code.

Exit codes: 0 done; 1 a check failed; 2 usage; 3 the package is bad; 4 this machine cannot do it.
"""

from __future__ import annotations


class ExportkitError(Exception):
    """Base of every error exportkit raises on purpose.

    Args:
        message: What was given and what is allowed.
        hint: What to do next, if that is more than the message says.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  {hint}")
        self.message = message
        self.hint = hint


# --- what the caller gave (2) -----------------------------------------------------------------------------------------


class UsageError(ExportkitError):
    """An argument does not mean anything: a bad name, a bad number, options that exclude each other."""

    exit_code = 2


class ModelNotFoundError(UsageError):
    """MODEL names nothing that can be imported, or something that is no model."""


class InputError(UsageError):
    """A model was called with inputs that it, or the package it was loaded from, does not allow."""


class WeightsError(UsageError):
    """A weights file does not fit the model it was given for."""


class NotAnOperatorLibraryError(UsageError):
    """A file given as an operator library is none: no shared library, or one that registers no operator."""


class MergeError(UsageError):
    """Artifacts that are not of one model were to become one package."""


# --- a step that failed (1) -------------------------------------------------------------------------------------------


class ExportError(ExportkitError):
    """torch.export, or the compilation that follows it, refused the model."""


class OperatorNotExportableError(ExportError):
    """A custom operator of the graph cannot travel: no fake kernel, or implemented in Python only."""


class WrongResultError(ExportkitError):
    """What was to be timed does not compute what its reference computes."""


class ModelRunError(ExportkitError):
    """Compiled code, or an operator it called, failed on inputs that the package allows."""


class ModelClosedError(ExportkitError):
    """A loaded model was used after close()."""


# --- the package is bad (3) -------------------------------------------------------------------------------------------


class PackageError(ExportkitError):
    """A package breaks a rule of FORMAT.md. One subclass a rule."""

    exit_code = 3


class NotAnArchiveError(PackageError):
    """The file is no readable zip archive (truncated ones included)."""


class NoManifestError(PackageError):
    """The archive has no exportkit/manifest.json: a stock .pt2, or not ours."""


class ArchiveLayoutError(PackageError):
    """Records do not lie under one root directory, or one is compressed, encrypted or not a plain file."""


class StockRecordError(PackageError):
    """One of the four records that torch's reader looks for first is missing, or says something else."""


class DuplicateRecordError(PackageError):
    """Two records have the same name."""


class UnsafeRecordNameError(PackageError):
    """A record's name is absolute, climbs with `..`, or is not plain POSIX."""


class ManifestTooLargeError(PackageError):
    """The manifest is larger than the format allows; it is not parsed."""


class ManifestSyntaxError(PackageError):
    """The manifest is not JSON of the shape FORMAT.md gives, an unknown key included."""


class FormatVersionError(PackageError):
    """The manifest's format version is not one this exportkit reads."""


class ManifestConsistencyError(PackageError):
    """The manifest contradicts itself: a reference to a target, library, dimension or record it does not have."""


class MissingRecordError(PackageError):
    """A record that the manifest lists is not in the archive."""


class UnlistedRecordError(PackageError):
    """The archive holds a record that the manifest does not list."""


class DigestMismatchError(PackageError):
    """A record's size or sha256 is not what the manifest says."""


class MissingLibraryError(PackageError):
    """An operator of the graph is given by no library of the package."""


class SchemaChangedError(PackageError):
    """A loaded operator's schema is not the manifest's."""


class LibraryConflictError(PackageError):
    """Another build of the same operator namespace is already loaded in this process."""


class LibraryLoadError(PackageError):
    """The dynamic linker refused an operator library."""


class SignatureMissingError(PackageError):
    """The package is not signed by any key that was asked for."""


class SignatureError(PackageError):
    """A signature does not hold: it was changed, is of another package, or its file is no signature file."""


class CaseError(PackageError):
    """A recorded case does not fit the manifest's inputs and outputs."""


# --- this machine (4) -------------------------------------------------------------------------------------------------


class HostError(ExportkitError):
    """This machine cannot do what was asked."""

    exit_code = 4


class NoTargetError(HostError):
    """No target of the package runs here; the message has a reason for each."""


class TorchVersionError(HostError):
    """The installed torch is not one the package, or a library in it, works with."""


class ModelLoadError(HostError):
    """torch's loader refused a target whose content is what it should be."""


class CacheError(HostError):
    """Neither the cache nor a temporary directory can hold what a package unpacks."""


class PolicyError(HostError):
    """This machine's policy on signatures cannot be read, or others may change it: nothing is loaded."""


class CompilerError(HostError):
    """No usable C++ compiler, or one whose output would not load."""
