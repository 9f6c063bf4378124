"""From compiled artifacts to a package that was seen to work before it got its name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from exportkit.errors import UsageError
from exportkit.fine_tune import with_weights
from exportkit.libraries import built_in_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.atomic import check_writable, temporary_folder
from exportkit.package.core import Demand
from exportkit.package.describe_library import describe_library
from exportkit.package.keys import PrivateKey
from exportkit.package.manifest import Manifest, encode_manifest
from exportkit.package.signing import sign_package
from exportkit.package.trust import demand
from exportkit.verify.options import VerifyOptions
from exportkit.verify.report import Report
from exportkit.verify.verify import verify


def build_package(
    artifacts: Sequence[Path],
    output: Path,
    *,
    op_libraries: Sequence[Path] = (),
    name: str | None = None,
    version: str | None = None,
    weights: Path | None = None,
    sign_key: PrivateKey | None = None,
    verify_options: VerifyOptions | None = None,
    progress: Callable[[str], None] = lambda step: None,
    public_keys: Sequence[Path] = (),
    signature: Path | None = None,
) -> tuple[Manifest, Report | None]:
    """Assembles a package and verifies it; `output` appears only if the verification passes.

    Verifying runs what the artifacts hold. They are held against the caller's keys and this machine's policies first,
    as `exportkit.load` does it. The package is signed last: while it runs, there is no signature that could be carried
    off, and the process that runs it takes this package, and no other, without one.

    Args:
        artifacts: Compiled artifacts, one a target.
        output: The package.
        op_libraries: Operator libraries to add. Our own are added where an operator of theirs is called.
        name: Of the package; the first artifact's if None.
        version: Of the model; the first artifact's if None.
        weights: Another fine-tune's, in the place of the artifacts'. The package then has no cases.
        sign_key: Signs it. The signature appears beside `output`, under its name.
        verify_options: How to verify it; None leaves that out. Its keys and signature are those below.
        progress: Told what is about to be done.
        public_keys: PEM files, of which any must have signed each artifact; what a policy asks for comes on top.
        signature: The signature file of an artifact that is packaged alone, where it is not beside it under its name.

    Returns:
        The manifest, and what the verification found, None where it was left out.

    Raises:
        UsageError: The output's folder cannot be written to, the artifacts do not go together, or the weights do not
            fit them.
        PackageError: An artifact is bad, or not signed as it must be, or an operator is provided by no library.
        PolicyError: A policy of this machine cannot be honoured.
    """
    check_writable(output)
    if signature is not None and len(artifacts) > 1:
        raise UsageError("one signature file was given for several artifacts", hint="Leave each beside its artifact.")
    asked = demand(public_keys or None, signature)
    libraries = list(op_libraries)
    for artifact in artifacts:
        progress(f"checking {artifact.name}")
        libraries += [path for path in _built_in(artifact, asked) if path not in libraries]
    described = []
    for library in libraries:
        progress(f"looking into {library.name}")
        described.append((library, describe_library(library)))
    # In the output's own directory, so that the last step is a rename; hidden, and gone if anything fails.
    with temporary_folder(output.parent, f".{output.name[:200]}") as folder:
        unverified = folder / output.name
        progress("writing the package")
        manifest = assemble(artifacts, described, unverified, name=name, version=version, demand=asked)
        if weights is not None:
            progress(f"exchanging the weights for those of {weights.name}")
            manifest = with_weights(unverified, weights, unverified)
        digest = hashlib.sha256(encode_manifest(manifest)).hexdigest()
        report = None
        if verify_options is not None:
            options = replace(verify_options, public_keys=public_keys, signature=signature)
            report = verify(unverified, options, unsigned=digest, progress=progress)
        if report is None or report.exit_code == 0:
            signed = sign_package(unverified, sign_key, manifest_sha256=digest) if sign_key is not None else None
            os.replace(unverified, output)
            if signed is not None:
                os.replace(signed, output.with_name(signed.name))
    return manifest, report


def _built_in(artifact: Path, asked: Demand) -> list[Path]:
    """Our own libraries that an artifact needs: the kernels of each device it has a target for."""
    with PackageReader(artifact, demand=asked) as reader:
        manifest = reader.manifest
    brought = {operator.name for library in manifest.libraries for operator in library.defines}
    if not any(op.name.startswith("arr_coc::") and op.name not in brought for op in manifest.operators):
        return []
    # The CPU library defines the operators; the CUDA one only adds kernels.
    devices = {"cpu", *(target.device for target in manifest.targets)}
    return [path for device, path in built_in_libraries().items() if device in devices]
