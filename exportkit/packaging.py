"""Assembles compiled artifacts into a package and verifies it before it gets its name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from exportkit.errors import UsageError
from exportkit.export.models.find_libraries import describe_libraries, named_libraries
from exportkit.onnx.files import refuse_sidecar
from exportkit.package import openssf
from exportkit.package import signature as own
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.atomic import check_writable, temporary_folder
from exportkit.package.consistency import operators_of
from exportkit.package.keys import PrivateKey
from exportkit.package.manifest import Manifest, encode_manifest
from exportkit.package.signing import sign_package, signature_path
from exportkit.progress import Progress, silent
from exportkit.reference_model import unnamed
from exportkit.verify.options import VerifyOptions
from exportkit.verify.report import Report
from exportkit.verify.verify import verify


@dataclass(frozen=True)
class PackOptions:
    """How a new package is verified and signed.

    What it is made of must be signed as the verification's `trust` says; its `eager` names libraries to add, too.
    Without `verify`, nothing of it runs. The signature by `sign_key` is written beside it. `attestations` are in-toto
    statements about its operator libraries.
    """

    verification: VerifyOptions = VerifyOptions()
    verify: bool = True
    sign_key: PrivateKey | None = None
    attestations: Sequence[Path] = ()


def build_package(
    artifacts: Sequence[Path],
    output: Path,
    options: PackOptions = PackOptions(),
    *,
    name: str | None = None,
    version: str | None = None,
    weights: Path | None = None,
    progress: Progress = silent,
) -> tuple[Manifest, Report | None]:
    """Assembles a package and verifies it. `output` is written only if the verification passes.

    Verification runs the artifacts' code, so their signatures are checked first against the caller's keys and this
    machine's policies, as `exportkit.load` does. The package is signed last, so that its code cannot steal the
    signature while it runs. Until then, the verifying process accepts only this package without a signature.

    The operators' libraries are those that the options name, or else those that importing the MODEL that the options
    name loads. Those that installed packages declare for the operators are added.

    Args:
        artifacts: Compiled artifacts. Each becomes a target.
        output: The package to write.
        options: How the package is verified and signed.
        name: The package's name. Default: the first artifact's.
        version: The model's version. Default: the first artifact's.
        weights: A safetensors file with the whole state of another fine-tune, which takes the place of the weights.
            The model that the options name records the cases again.
        progress: Called with each step before it starts.

    Returns:
        The manifest and the verification's report, which is None if it was skipped.

    Raises:
        UsageError: The output's folder cannot be written to, a signature of another package is beside the output, the
            artifacts do not belong together, or nothing can record cases for the weights.
        WeightsError: The weights do not fit.
        PackageError: An artifact is bad or lacks a required signature, or no library defines an operator.
        PolicyError: A policy of this machine cannot be read or trusted.
    """
    trust, eager = options.verification.trust, options.verification.eager
    read = [weights, *eager.op_libraries, *options.attestations]
    check_writable(output, sum(artifact.stat().st_size for artifact in artifacts), read)
    _refuse_old_signatures(output, options.sign_key)
    if trust.signature is not None and len(artifacts) > 1:
        raise UsageError(
            "one signature file was given for several artifacts", hint="Put each signature beside its artifact."
        )
    manifests = []
    for artifact in artifacts:
        progress(f"checking {artifact.name}")
        with PackageReader(artifact, demand=trust.demand()) as reader:
            refuse_sidecar(reader)
            manifests.append(reader.manifest)
    if options.verify:  # the verdicts need torch, and other processes import it meanwhile
        threading.Thread(target=_import_judging).start()
    devices = {target.device for each in manifests for target in each.targets}
    missing = _missing(manifests)
    described = describe_libraries(named_libraries(eager, missing, progress), missing, devices, progress)
    # A hidden folder beside the output, so that the last step is a rename. It is removed if anything fails.
    with temporary_folder(output.parent, f".{output.name[:200]}") as folder:
        unverified = folder / output.name
        progress("writing the package")
        manifest = assemble(
            artifacts,
            described,
            unverified,
            name=name,
            version=version,
            attestations=options.attestations,
            demand=trust.demand(),
        )
        if weights is not None:
            from exportkit.fine_tune.new_weights import fine_tune  # imports torch's compiler, which takes seconds

            recorded, by, timeout = manifest.source.model, trust.demanded_by(), options.verification.timeout
            model, why = eager.model_of(recorded, by), unnamed(recorded, by)
            manifest = fine_tune(unverified, weights, model, unnamed=why, timeout=timeout, progress=progress)
        # The package has the libraries, and MODEL loads its own.
        verification = replace(options.verification, eager=replace(eager, op_libraries=()))
        options = replace(options, verification=verification)
        return manifest, _verify_and_rename(unverified, output, manifest, options, progress)


def _verify_and_rename(
    unverified: Path, output: Path, manifest: Manifest, options: PackOptions, progress: Progress
) -> Report | None:
    """Verifies a new package, signs it, and gives it its name if nothing failed. Returns the report of verifying."""
    digest, key = hashlib.sha256(encode_manifest(manifest)).hexdigest(), options.sign_key
    report = verify(unverified, options.verification, unsigned=digest, progress=progress) if options.verify else None
    if report is None or not report.wrong:
        signed = sign_package(unverified, key, manifest_sha256=digest) if key is not None else None
        os.replace(unverified, output)
        if signed is not None:
            os.replace(signed, output.with_name(signed.name))
    return report


def _refuse_old_signatures(output: Path, sign_key: PrivateKey | None) -> None:
    """Refuses to leave the signature of another package beside the new one."""
    written = signature_path(output, sign_key) if sign_key is not None else None
    for suffix in (own.SUFFIX, openssf.SUFFIX):
        old = output.with_name(output.name + suffix)
        if old.exists() and old != written:
            said = f"{old} is beside {output.name} and would not belong to the new package"
            raise UsageError(said, hint="Remove it, or write another file. --sign-key signs the new package.")


def _import_judging() -> None:
    with contextlib.suppress(Exception):  # `verify` will raise it again
        importlib.import_module("exportkit.verify.judging")


def _missing(manifests: Sequence[Manifest]) -> set[str]:
    """Returns the operators that the artifacts' libraries do not have."""
    brought = {name for manifest in manifests for library in manifest.libraries for name in operators_of(library)}
    return {operator.name for manifest in manifests for operator in manifest.operators} - brought
