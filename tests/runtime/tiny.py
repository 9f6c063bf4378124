"""Small compiled models and the manifests that go with them, written by hand: what the runtime must cope with.

The exporter has no part in them but for how it calls the compiler, so that the runtime's tests fail for the runtime's
reasons. Compiled code is kept under .cache/ by the content of what it was made from.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import save
from torch._inductor.config import aot_inductor

from exportkit.export.compile.model_sources import compiling_model_sources
from exportkit.libraries import host_platform
from exportkit.package import manifest as m
from exportkit.package.archive import write_package
from tests.made_once import one_maker
from tests.package import samples

CACHE = Path(__file__).parents[2] / ".cache" / "runtime"
OPTIONS = {
    "aot_inductor.package": True,
    # Torch would compile and run a program for each instruction set, and two headers in advance: 18 CPU seconds.
    "cpp.vec_isa_ok": True,
    "aot_inductor.precompile_headers": False,
    "cpp.simdlen": 256,
    "cpp.dynamic_threads": True,
    # torch 2.11 has no such option, and makes no line tables.
    **({"aot_inductor.enable_line_tables": False} if hasattr(aot_inductor, "enable_line_tables") else {}),
}


EXACT, NEAR, BATCH, tensors_call = samples.EXACT, samples.NEAR, samples.BATCH, samples.tensors_call


class Regions(NamedTuple):
    mean: torch.Tensor
    doubled: torch.Tensor


class Tiny(torch.nn.Module):
    """Two tensors, one of them in a dict beside a constant, an optional one by name, and a nested output."""

    def forward(self, image: torch.Tensor, query: dict[str, Any], *, offset: torch.Tensor | None = None) -> Any:
        mean = image.mean((2, 3)) + query["features"].sum(1, keepdim=True)
        if query["mode"] == "scaled":
            mean = mean * 3
        assert offset is not None
        return {"regions": Regions(mean, image * 2), "rest": [query["features"] + offset, None, "done"]}


class Flat(torch.nn.Module):
    """Tiny with what is fixed taken out: tensors in, tensors out, which is what compiled code is."""

    def forward(self, image: torch.Tensor, features: torch.Tensor, offset: torch.Tensor) -> list[torch.Tensor]:
        result = Tiny().forward(image, {"features": features, "mode": "scaled"}, offset=offset)
        return [*result["regions"], result["rest"][0]]


def example(batch: int = 3, gh: int = 2, mode: str = "scaled") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call of Tiny."""
    features = torch.randn(batch, 5)
    return (torch.rand(batch, 3, 16 * gh, 8), {"features": features, "mode": mode}), {"offset": torch.randn(5)}


def call() -> m.Call:
    """The manifest's description of Tiny's call."""
    rows = m.Size(dimension="gh", scale=16)
    inputs = {"image": (BATCH, 3, rows, 8), "query.features": (BATCH, 5), "offset": (5,)}
    outputs = {"regions.mean": (BATCH, 3), "regions.doubled": (BATCH, 3, rows, 8), "rest.0": (BATCH, 5)}
    described, answered = ({name: ("float32", shape) for name, shape in each.items()} for each in (inputs, outputs))
    flat = tensors_call(described, answered, tolerance=NEAR, batch=(1, 4), gh=(1, 6))
    first, second, third = (m.TensorNode(index=index) for index in range(3))
    query = m.MappingNode(keys=("features", "mode"), items=(second, m.ConstantNode(value="scaled")))
    regions = m.NamedTupleNode(class_name="Regions", fields=("mean", "doubled"), items=(first, second))
    rest = m.SequenceNode(kind="list", items=(third, m.ConstantNode(value=None), m.ConstantNode(value="done")))
    return msgspec.structs.replace(
        flat,
        parameters=(
            m.Parameter(name="image", kind="positional", value=first),
            m.Parameter(name="query", kind="positional", value=query),
            m.Parameter(name="offset", kind="keyword", value=third),
        ),
        result=m.MappingNode(keys=("regions", "rest"), items=(regions, rest)),
    )


def library(content: bytes, *schemas: str, name: str = "libtoy.so", **changes: Any) -> m.Library:
    """A library with this content, which defines operators, with some of its keys changed."""
    plain = m.Library(
        record=f"exportkit/ops/{host_platform()}/{name}",
        sha256=hashlib.sha256(content).hexdigest(),
        platform=host_platform(),
        device="cpu",
        kernels=("cpu",),
        defines=tuple(m.Operator(name=schema.partition("(")[0], schema=schema) for schema in schemas),
        needs_torch="2.11",
        torch_bound=None,
        needs=(),
    )
    return msgspec.structs.replace(plain, **changes)


def compiled(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    dynamic_shapes: Any,
    *,
    compiler: Path | None = None,
    **of_inductor: Any,
) -> dict[str, Path]:
    """A model's compiled files by name, from the cache if they are there. `of_inductor` adds AOTInductor options."""
    source = inspect.getsource(inspect.getmodule(type(module)))
    key = (source, type(module), torch.__version__, compiler and compiler.read_text(), *of_inductor.items())
    folder = CACHE / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    with one_maker(folder) as ours:
        if ours:
            # Not in Inductor's cache, where another checkout may have left the same.
            work = tempfile.mkdtemp(dir=folder.parent)
            options = {**OPTIONS, "aot_inductor.output_path": work}
            options |= {f"aot_inductor.{name}": value for name, value in of_inductor.items()}
            options |= {"cpp.cxx": (None, str(compiler))} if compiler else {}
            program = torch.export.export(module.eval(), args, dynamic_shapes=dynamic_shapes)
            # Spares std::regex, a third of the compiler's time, unless a test is about this compiler.
            with nullcontext() if compiler else compiling_model_sources(keep=False):
                files = torch._inductor.aot_compile(
                    program.module(check_guards=False), *program.example_inputs, options=options
                )
            temporary = tempfile.mkdtemp(dir=folder.parent)
            for file in map(Path, files):
                # 2.11's loader wants a wrapper.cpp to be there; nobody needs what is in it.
                if not file.name.endswith("kernel.cpp"):
                    Path(temporary, file.name).write_bytes(b"" if file.suffix == ".cpp" else file.read_bytes())
            os.rename(temporary, folder)
            shutil.rmtree(work)
    return {file.name: file for file in folder.iterdir()}


def tiny_files(compiler: Path | None = None) -> dict[str, Path]:
    """Tiny, compiled."""
    args, kwargs = example()
    batch, gh = torch.export.Dim("batch", min=1, max=4), torch.export.Dim("gh", min=1, max=6)
    shapes = {"image": {0: batch, 2: 16 * gh}, "features": {0: batch}, "offset": None}
    return compiled(Flat(), (args[0], args[1]["features"], kwargs["offset"]), shapes, compiler=compiler)


def target(**changes: Any) -> m.Target:
    """A target that runs on any CPU, with some of its keys changed."""
    plain = {"name": "cpu", "platform": host_platform(), "cpu_isa": None, "constants": {"forward": {}}}
    return samples.target(**{**plain, "built_with_torch": str(torch.__version__), **changes})


def case(args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> bytes:
    """A recorded case of Tiny."""
    inputs = [args[0], args[1]["features"], kwargs["offset"]]
    tensors = {f"0.input.{i}": tensor for i, tensor in enumerate(inputs)}
    return save(tensors | {f"0.output.{i}": tensor for i, tensor in enumerate(outputs)})


def one_call(record: str, **sizes: int) -> m.Case:
    """A recorded case of one call of `forward`, without references."""
    return m.Case(record=record, calls=(m.CaseCall(method="forward", sizes=sizes),))


def write_code(
    path: Path, code: bytes = b"\x7fELF compiled code" * 100, *, record: str = "a.so", **changes: Any
) -> Path:
    """Writes a package whose code is not run."""
    file = path.with_name(f"{path.stem}.so")
    file.write_bytes(code)
    return write(path, {record: file}, **changes)


def forward(of: m.Call) -> tuple[m.PackagedMethod, ...]:
    """The methods of a model that has this call only."""
    return (m.PackagedMethod(name="forward", call=of, state=()),)


def write(
    path: Path,
    files: Mapping[str, Path],
    *,
    extra: Mapping[str, bytes | Path] | None = None,
    targets: tuple[m.Target, ...] | None = None,
    change: Callable[[m.Manifest], m.Manifest] = lambda manifest: manifest,
    **changes: Any,
) -> Path:
    """Writes a package with these compiled files under each target. `call` may be given in place of `methods`."""
    if (of := changes.pop("call", None)) is not None:
        changes["methods"] = forward(of)
    targets = targets or (target(),)
    source = m.Source(model=None, model_kwargs={}, dtype=None, seed=0, state_sha256="0" * 64)
    manifest = samples.bare_manifest("tiny", methods=forward(call()), source=source, targets=targets)
    records: dict[str, bytes | Path] = dict(extra or {})
    for each in targets:
        records |= {f"data/aotinductor/{each.name}/{name}": file for name, file in files.items()}
    write_package(path, change(msgspec.structs.replace(manifest, **changes)), records)
    return path
