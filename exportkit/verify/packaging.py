"""From compiled artifacts to a package that was seen to work before it got its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from exportkit.libraries import built_in_libraries
from exportkit.package.archive import PackageReader
from exportkit.package.assemble import assemble
from exportkit.package.atomic import check_writable, temporary_folder
from exportkit.package.keys import PrivateKey
from exportkit.package.libraries import describe_library
from exportkit.package.manifest import Manifest
from exportkit.package.signing import sign_package
from exportkit.verify.fine_tune import with_weights
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Report
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
) -> tuple[Manifest, Report | None]:
    """Assembles a package and verifies it; `output` appears only if the verification passes.

    Args:
        artifacts: Compiled artifacts, one a target.
        output: The package.
        op_libraries: Operator libraries to add. Our own are added where an operator of theirs is called.
        name: Of the package; the first artifact's if None.
        version: Of the model; the first artifact's if None.
        weights: Another fine-tune's, in the place of the artifacts'. The package then has no cases.
        sign_key: Signs it. The signature appears beside `output`, under its name.
        verify_options: How to verify it; None leaves that out.
        progress: Told what is about to be done.

    Returns:
        The manifest, and what the verification found, None where it was left out.

    Raises:
        UsageError: The output's folder cannot be written to, the artifacts do not go together, or the weights do not
            fit them.
        PackageError: An artifact is bad, or an operator is provided by no library.
    """
    check_writable(output)
    libraries = list(op_libraries)
    for artifact in artifacts:
        progress(f"checking {artifact.name}")
        libraries += [path for path in _built_in(artifact) if path not in libraries]
    described = []
    for library in libraries:
        progress(f"looking into {library.name}")
        described.append((library, describe_library(library)))
    # In the output's own directory, so that the last step is a rename; hidden, and gone if anything fails.
    with temporary_folder(output.parent, f".{output.name[:200]}") as folder:
        unverified = folder / output.name
        progress("writing the package")
        manifest = assemble(artifacts, described, unverified, name=name, version=version)
        if weights is not None:
            progress(f"exchanging the weights for those of {weights.name}")
            manifest = with_weights(unverified, weights, unverified)
        # Signed first, so that it can be run where a policy asks for signatures; the signature goes with the package.
        signature = None if sign_key is None else sign_package(unverified, sign_key)
        report = None if verify_options is None else verify(unverified, verify_options, progress=progress)
        if report is None or report.exit_code == 0:
            os.replace(unverified, output)
            if signature is not None:
                os.replace(signature, output.with_name(signature.name))
    return manifest, report


def _built_in(artifact: Path) -> list[Path]:
    """Our own libraries that an artifact needs: the kernels of each device it has a target for."""
    with PackageReader(artifact) as reader:
        manifest = reader.manifest
    brought = {operator.name for library in manifest.libraries for operator in library.defines}
    if not any(op.name.startswith("arr_coc::") and op.name not in brought for op in manifest.operators):
        return []
    # The CPU library defines the operators; the CUDA one only adds kernels.
    devices = {"cpu", *(target.device for target in manifest.targets)}
    return [path for device, path in built_in_libraries().items() if device in devices]
