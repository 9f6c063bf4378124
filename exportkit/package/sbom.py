"""The SBOM of a package: what its manifest says of the code that it has, and of what that was made with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import exportkit
from exportkit.package.archive import PackageReader
from exportkit.package.consistency import AOTINDUCTOR_DIR
from exportkit.package.manifest import Library, Manifest, Target, code_folder
from exportkit.spdx import Component, document


def package_sbom(reader: PackageReader) -> bytes:
    """Returns a package's SBOM in SPDX 2.3. It reads the file for its digest, and runs nothing.

    The compiler of an operator library is not known: whoever built the library knows it.
    """
    manifest = reader.manifest
    whole = Component(
        manifest.name,
        manifest.version,
        sha256=reader.sha256,
        file=reader.path.name,
        purpose="OTHER",
        comment=f"a package of exportkit; its manifest has sha256 {reader.manifest_sha256}",
    )
    tool = f"exportkit-{exportkit.__version__}"
    return document(whole, [*_contained(manifest), *_made_with(manifest)], tool=tool, identity=reader.manifest_sha256)


def _contained(manifest: Manifest) -> Iterator[Component]:
    for library in manifest.libraries:
        yield Component(
            Path(library.record).name, sha256=library.sha256, file=library.record, comment=_library_comment(library)
        )
    for target in manifest.targets:
        folders = tuple(f"{AOTINDUCTOR_DIR}/{code_folder(target.name, each.name)}/" for each in manifest.methods)
        for record in manifest.records:
            if record.name.startswith(folders) and Path(record.name).suffix in (".so", ".cubin", ".fatbin", ".ptx"):
                name, comment = Path(record.name).name, _target_comment(target)
                yield Component(name, sha256=record.sha256, file=record.name, comment=comment)
    for model in manifest.onnx:
        yield Component("ONNX model", sha256=model.sha256, purpose="OTHER", comment=f"beside it; opset {model.opset}")


def _library_comment(library: Library) -> str:
    needs = ", ".join([f"torch {library.torch_bound or library.needs_torch + ' or newer'}", *library.needs])
    defines = ", ".join(operator.name for operator in library.defines) or "kernels only"
    return f"operator library for {library.platform}, {library.device}; defines {defines}; needs {needs}"


def _target_comment(target: Target) -> str:
    level = target.cuda_architecture or target.cpu_isa or "baseline"
    return f"compiled code of target {target.name} for {target.platform}, {level}; needs torch {target.needs_torch}"


def _made_with(manifest: Manifest) -> Iterator[Component]:
    made = manifest.provenance
    commit = "" if made.commit is None else f"; the model's sources had commit {made.commit}"
    yield Component(
        "exportkit", made.exportkit, purpose="APPLICATION", pypi=True, relation="BUILD_TOOL_OF",
        comment=f"wrote it{commit}" if commit else None,
    )  # fmt: skip
    compilers = {("torch", made.torch, "traced the model")}
    for target in manifest.targets:
        compilers.add(("torch", target.built_with_torch, "compiled targets (TorchInductor)"))
        if target.built_with_cuda is not None:
            compilers.add(("CUDA toolkit", target.built_with_cuda, "compiled targets"))
    for name, version, comment in sorted(compilers):
        yield Component(
            name, version, purpose="APPLICATION", pypi=name == "torch", comment=comment, relation="BUILD_TOOL_OF"
        )
    if manifest.targets or manifest.libraries:
        oldest = [each.needs_torch for each in manifest.targets] + [each.needs_torch for each in manifest.libraries]
        newest = max(oldest, key=lambda version: [int(part) for part in version.split(".")[:2]])
        yield Component("torch", purpose="FRAMEWORK", comment=f"{newest} or newer", relation="RUNTIME_DEPENDENCY_OF")
