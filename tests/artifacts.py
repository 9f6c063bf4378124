"""Artifacts that several tests share: compiled once for these sources and this torch, kept under .cache/artifacts.

Each is made by a process of its own, as `exportkit export` makes it, so that no test finds operators or modules loaded
that the artifact's own test did not ask for.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from exportkit.package.assemble import assemble
from exportkit.package.describe_library import describe_library
from exportkit.package.manifest import Manifest
from tests.fixtures import softpool_library, stable_library
from tests.made_once import one_maker
from tests.subprocesses import run_python

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "artifacts"
_SOURCES = {".py", ".h", ".cpp", ".cu", ".cuh"}
THIRD_PARTY = ROOT / "tests" / "fixtures" / "third_party"

_SCRIPT = """
import json, sys
from pathlib import Path
from exportkit.export.artifact import export_aoti, export_program
from exportkit.export.export_options import CompileOptions, TraceOptions
from exportkit.export.models.resolve import resolve
task = json.loads(sys.argv[1])
libraries = [Path(library) for library in task["libraries"]]
resolved = resolve(task["model"], inputs=task["inputs"], op_libraries=libraries, model_kwargs=task["model_kwargs"])
trace = {"edge_cases": False} | task["trace"]  # most tests compare with the cases as they are
out, options = Path(sys.argv[2]), TraceOptions(dynamic=task["dynamic"], **trace)
if task["program"]:
    export_program(resolved, out, options)
else:
    export_aoti(resolved, out, options, CompileOptions(**task["compile"]))
"""


@dataclass(frozen=True)
class Recipe:
    """How an artifact is made: what `exportkit export` is given, and the sources it depends on."""

    model: str
    sources: Sequence[str]
    inputs: Sequence[str] = ()
    dynamic: Sequence[str] = ()
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    softpool: bool = False  # needs the third-party library
    operators: str | None = None  # the source of a library of the stable ABI that it needs
    program: bool = False
    trace: Mapping[str, Any] = field(default_factory=dict)  # of TraceOptions
    compile: Mapping[str, Any] = field(default_factory=dict)  # of CompileOptions


_PATCHES = Recipe(
    "tests/export/export_models.py:patches", ["tests/export/export_models.py", "exportkit/arr_coc/ops", "csrc"]
)
_SOFTPOOL = Recipe(
    "softpool.model:Classifier",
    ["tests/fixtures/third_party"],
    inputs=["tokens=float32[3,6,8]", "bias=float32[3,6]"],
    dynamic=["tokens:0=batch[1:16]", "tokens:1=length[2:64]", "bias:0=batch", "bias:1=length"],
    softpool=True,
)
_SHAPES = Recipe(
    "tests/export/shapes_models.py:shapes",
    ["tests/export/shapes_models.py", "tests/export/op_shapes.cpp"],
    operators="tests/export/op_shapes.cpp",
)
_KEPT = Recipe(
    "tests/export/kept_models.py:keep_any",
    ["tests/export/kept_models.py", "tests/export/kept_rows.cpp"],
    operators="tests/export/kept_rows.cpp",
    trace={"edge_cases": True},
)
_TRITON = Recipe("tests/export/export_models.py:quantize", ["tests/export/export_models.py", "exportkit/arr_coc/ops"])
_WEIGHTED = Recipe(
    "tests/export/weights_models.py:weighted",
    ["tests/export/weights_models.py"],
    compile={"cpu_isas": ["x86-64-v3", "x86-64-v4"]} if platform.machine() == "x86_64" else {},
)
_GRAPHS = Recipe(
    "tests/export/graph_models.py:mixed", ["tests/export/graph_models.py"], trace={"device": "cuda", "cases": 1}
)
_STATE_GRAPHS = Recipe(
    "tests/export/state_graph_models.py:decoder",
    ["tests/export/state_graph_models.py"],
    trace={"device": "cuda", "cases": 1},
)
_RECURRENT = Recipe(
    "tests/recurrent/recurrent_models.py:both",
    ["tests/recurrent/recurrent_models.py", "exportkit/recurrent", "csrc/recurrent"],
)
_ROTATED = Recipe("tests/verify/layout_models.py:rotated", ["tests/verify/layout_models.py"])
_DIARY = Recipe("tests/runtime/diary_models.py:diary", ["tests/runtime/diary_models.py"])
_LOOKUPS = Recipe("tests/runtime/refusing_models.py:lookups", ["tests/runtime/refusing_models.py"])
PASSES_DTYPES = TorchVersion(torch.__version__) >= (2, 12)
"""Whether compiled code passes the dtypes to operators that it says: torch 2.11 takes int64 for float16."""

runs_op_shapes = pytest.mark.skipif(not PASSES_DTYPES, reason="torch 2.11 passes another dtype, and is refused")
"""For tests that run "op-shapes"."""

RECIPES: Mapping[str, Recipe] = {
    # Our operators, dimensions that are multiples, a dict of outputs.
    "patches": _PATCHES,
    "patches-program": Recipe(_PATCHES.model, _PATCHES.sources, program=True),
    # Somebody else's operators, a named tuple of outputs, an input by keyword.
    "softpool": _SOFTPOOL,
    # Operators with every kind of argument and result.
    "op-shapes": _SHAPES,
    # Rows whose number depends on data.
    "keep-any": _KEPT,
    "keep-of-two": replace(_KEPT, model="tests/export/kept_models.py:keep_of_two", trace={}),
    # Operators whose kernels AOTInductor compiles into the package.
    "triton-cpu": replace(_TRITON, compile={"embed_weights": True}),  # weights inside: torch's own loaders run it
    "triton-cuda": replace(_TRITON, trace={"device": "cuda"}, compile={"embed_weights": True}),
    "triton-program": replace(_TRITON, program=True),
    # Every kind of weight, outside of the code of two targets.
    "weighted": _WEIGHTED,
    "weighted-cuda": replace(_WEIGHTED, trace={"device": "cuda"}, compile={}),
    # Convolutions that are computed as products.
    "small-convolutions": Recipe("tests/export/small_models.py:small", ["tests/export/small_models.py"]),
    # Larger than all else: 128 MiB of weights.
    "table": replace(_WEIGHTED, model="tests/export/weights_models.py:table", trace={"cases": 1}, compile={}),
    # For CUDA graphs: results of several kinds, and calls that no graph can repeat.
    "mixed-cuda": _GRAPHS,
    "selects-cuda": replace(_GRAPHS, model="tests/export/graph_models.py:selects"),
    "products-cuda": replace(_GRAPHS, model="tests/export/graph_models.py:products"),
    "random-cuda": replace(
        _GRAPHS,
        model="tests/export/graph_models.py:random",
        trace={"device": "cuda", "cases": 1, "allow_nondeterministic": True},
    ),
    # For CUDA graphs with state.
    "decoder-cuda": _STATE_GRAPHS,
    "selects-state-cuda": replace(_STATE_GRAPHS, model="tests/export/state_graph_models.py:selects"),
    "writes-cuda": replace(_STATE_GRAPHS, model="tests/export/state_graph_models.py:writes"),
    # Methods with state, and one with all of its buffers as state.
    "decoder": Recipe("tests/verify/state_models.py:decoder", ["tests/verify/state_models.py"]),
    "decoder-program": Recipe("tests/verify/state_models.py:decoder", ["tests/verify/state_models.py"], program=True),
    "counter": Recipe("tests/verify/state_models.py:counter", ["tests/verify/state_models.py"]),
    "given-cuda": Recipe(
        "exportkit.arr_coc.model:features_spec",
        ["exportkit/arr_coc", "csrc"],
        model_kwargs={"dim": 64},
        trace={"device": "cuda"},
    ),
    # Pairs of elements that are seen as complex numbers.
    "rotated": _ROTATED,
    "rotated-program": replace(_ROTATED, program=True),
    # Recurrent layers, and packed sequences.
    "recurrent": _RECURRENT,
    "recurrent-cuda": replace(_RECURRENT, trace={"device": "cuda"}),
    # Values that are refused where they are out of range; and with rows that a server joins, and with state.
    "lookups": _LOOKUPS,
    "attention": replace(_LOOKUPS, model="tests/runtime/refusing_models.py:attention"),
    "attention-cuda": replace(_LOOKUPS, model="tests/runtime/refusing_models.py:attention", trace={"device": "cuda"}),
    "words": replace(_LOOKUPS, model="tests/runtime/refusing_models.py:words"),
    "notebook": replace(_LOOKUPS, model="tests/runtime/refusing_models.py:notebook"),
    # And with state whose rows a caller joins.
    "diary": _DIARY,
    "diary-cuda": replace(_DIARY, trace={"device": "cuda"}),
    "words-cuda": replace(_LOOKUPS, model="tests/runtime/refusing_models.py:words", trace={"device": "cuda"}),
    "notebook-cuda": replace(_LOOKUPS, model="tests/runtime/refusing_models.py:notebook", trace={"device": "cuda"}),
    "lookups-cuda": replace(
        _LOOKUPS, model="tests/runtime/refusing_models.py:lookups_of_tensors", trace={"device": "cuda", "cases": 1}
    ),
    # Parameters that are state.
    "self-taught": Recipe(
        "tests/learning/learning_models.py:self_taught",
        ["tests/learning/learning_models.py", "exportkit/training.py"],
    ),
    # A language model whose rows have adapters.
    "adapters": Recipe(
        "tests/language_models/adapter_models.py:adapted",
        ["tests/language_models/adapter_models.py", "exportkit/transformers"],
    ),
    "arr-coc": Recipe("arr-coc", ["exportkit/arr_coc", "csrc"]),
}


def artifact(name: str) -> Path:
    """The artifact of this name; made if it is not in the cache.

    Those with `arr_coc::*` operators need the built library; "softpool" builds one. Without g++ the test is skipped.
    """
    recipe = RECIPES[name]
    libraries: list[str] = []
    search = [str(ROOT), str(THIRD_PARTY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(search)}
    if recipe.softpool:
        library = softpool_library.build()
        libraries = [str(library)]
        environment["SOFTPOOL_LIBRARY"] = str(library)
    if recipe.operators is not None:
        libraries = [str(stable_library.build(ROOT / recipe.operators))]
    path = CACHE / _key(recipe) / f"{name}.pt2"
    task = asdict(recipe) | {"libraries": libraries}
    with one_maker(path) as ours:
        if ours:
            run_python(_SCRIPT, json.dumps(task), path, cwd=ROOT, compiler=True, **environment)
    return path


def packaged(name: str, path: Path, /, *libraries: Path, **options: Any) -> Manifest:
    """Writes a package of the artifact of this name and of operator libraries."""
    return assemble([artifact(name)], [(each, describe_library(each)) for each in libraries], path, **options)


def _key(recipe: Recipe) -> str:
    digest = hashlib.sha256(repr((recipe, torch.__version__)).encode())
    for source in ("exportkit/export", "exportkit/package", "exportkit/spec.py"):
        for file in _files(ROOT / source):
            digest.update(f"{file.relative_to(ROOT)}\n".encode() + _code(file))
    for source in recipe.sources:  # a package names their lines
        for file in _files(ROOT / source):
            digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _files(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.suffix in _SOURCES)


@functools.cache
def _code(file: Path) -> bytes:
    """A source without its comments, docstrings and layout, which change no artifact."""
    if file.suffix != ".py":
        return file.read_bytes()
    tree = ast.parse(file.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree).encode()
