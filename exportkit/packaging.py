"""Assembles compiled artifacts into a package and verifies it before it gets its name."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path

from exportkit.errors import ExportError, LibraryLoadError, ModelNotFoundError, UsageError
from exportkit.export.find_libraries import describe_libraries, find_libraries
from exportkit.installed import operator_namespaces
from exportkit.onnx.files import refuse_companion
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.atomic import check_writable, temporary_folder
from exportkit.package.keys import PrivateKey
from exportkit.package.manifest import Manifest, encode_manifest
from exportkit.package.signing import sign_package
from exportkit.package.trust import demand, demanded_by
from exportkit.verify.options import VerifyOptions
from exportkit.verify.report import Report
from exportkit.verify.verify import verify


def build_package(
    artifacts: Sequence[Path],
    output: Path,
    *,
    op_libraries: Sequence[Path | str] = (),
    name: str | None = None,
    version: str | None = None,
    weights: Path | None = None,
    sign_key: PrivateKey | None = None,
    verify_options: VerifyOptions | None = None,
    progress: Callable[[str], None] = lambda step: None,
    public_keys: Sequence[Path] = (),
    signature: Path | None = None,
) -> tuple[Manifest, Report | None]:
    """Assembles a package and verifies it. `output` is written only if the verification passes.

    Verification runs the artifacts' code, so their signatures are checked first against the caller's keys and this
    machine's policies, as `exportkit.load` does. The package is signed last, so that its code cannot steal the
    signature while it runs. Until then, the verifying process accepts only this package without a signature.

    Args:
        artifacts: Compiled artifacts. Each becomes a target.
        output: The package to write.
        op_libraries: Operator libraries to add, or modules whose import loads them. Default: those that importing the
            recorded model loads, unless signatures are required; then only `verify_options.model` is imported.
            Those that installed packages declare for the operators are added.
        name: The package's name. Default: the first artifact's.
        version: The model's version. Default: the first artifact's.
        weights: A file with another fine-tune's weights. The package then has no cases.
        sign_key: The key that signs the package. The signature is written beside `output`.
        verify_options: The options of the verification, or None to skip it. `public_keys` and `signature` replace its
            own.
        progress: Called with each step before it starts.
        public_keys: PEM files. One of these keys must have signed each artifact. Each policy adds its own requirement.
        signature: The signature file of a single artifact, if it is not beside the artifact.

    Returns:
        The manifest and the verification's report, which is None if it was skipped.

    Raises:
        UsageError: The output's folder cannot be written to, the artifacts do not belong together, or the weights do
            not fit them.
        PackageError: An artifact is bad or lacks a required signature, or no library defines an operator.
        PolicyError: A policy of this machine cannot be read or trusted.
    """
    check_writable(output)
    if signature is not None and len(artifacts) > 1:
        raise UsageError(
            "one signature file was given for several artifacts", hint="Put each signature beside its artifact."
        )
    asked = demand(public_keys or None, signature)
    manifests = []
    for artifact in artifacts:
        progress(f"checking {artifact.name}")
        with PackageReader(artifact, demand=asked) as reader:
            refuse_companion(reader)
            manifests.append(reader.manifest)
    model = verify_options.model if verify_options else None
    if model is None and demanded_by(public_keys or None, signature) is None:
        model = manifests[0].source.model if manifests else None
    devices = {target.device for each in manifests for target in each.targets}
    missing = _missing(manifests)
    described = describe_libraries(_given(op_libraries, model, missing, progress), missing, devices, progress)
    # A hidden folder beside the output, so that the last step is a rename. It is removed if anything fails.
    with temporary_folder(output.parent, f".{output.name[:200]}") as folder:
        unverified = folder / output.name
        progress("writing the package")
        manifest = assemble(artifacts, described, unverified, name=name, version=version, demand=asked)
        if weights is not None:
            progress(f"replacing the weights with {weights.name}")
            from exportkit.fine_tune import with_weights  # imports torch's compiler, which takes seconds

            manifest = with_weights(unverified, weights, unverified)
        options = None
        if verify_options is not None:
            options = replace(verify_options, public_keys=public_keys, signature=signature)
        report = verify_and_rename(unverified, output, manifest, options, sign_key=sign_key, progress=progress)
    return manifest, report


def verify_and_rename(
    unverified: Path,
    output: Path,
    manifest: Manifest,
    options: VerifyOptions | None,
    *,
    sign_key: PrivateKey | None,
    progress: Callable[[str], None],
) -> Report | None:
    """Verifies a new package, signs it, and gives it its name if it passed.

    Args:
        unverified: The package, in a private folder on the same file system as `output`.
        output: The name.
        manifest: The package's manifest.
        options: The options of the verification, or None to skip it.
        sign_key: The key that signs the package, or None.
        progress: Called with each step before it starts.

    Returns:
        The verification's report; None if it was skipped.
    """
    digest = hashlib.sha256(encode_manifest(manifest)).hexdigest()
    report = verify(unverified, options, unsigned=digest, progress=progress) if options is not None else None
    if report is None or report.exit_code == 0:
        signed = sign_package(unverified, sign_key, manifest_sha256=digest) if sign_key is not None else None
        os.replace(unverified, output)
        if signed is not None:
            os.replace(signed, output.with_name(signed.name))
    return report


def _missing(manifests: Sequence[Manifest]) -> set[str]:
    """Returns the operators that the artifacts' libraries do not define."""
    brought = {
        operator.name for manifest in manifests for library in manifest.libraries for operator in library.defines
    }
    return {operator.name for manifest in manifests for operator in manifest.operators} - brought


def _given(
    op_libraries: Sequence[Path | str], model: str | None, missing: Set[str], progress: Callable[[str], None]
) -> Sequence[Path | str]:
    """Returns the libraries that were given, or else those that the model's module loads."""
    source = (model or "").rpartition(":")[0]
    wanted = sorted(name for name in missing if name.partition("::")[0] not in operator_namespaces())
    if op_libraries or not source or not wanted:
        return op_libraries
    progress(f"importing {source} to find the library of {', '.join(wanted)}")
    libraries: list[Path] = []
    with contextlib.suppress(ModelNotFoundError, ExportError, LibraryLoadError):  # then none is found
        libraries = find_libraries(source, wanted)
    for path in libraries:
        progress(f"taking {path}, which {source} loads")
    return libraries
