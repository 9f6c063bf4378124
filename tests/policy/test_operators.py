"""An operator is complete: a SPEC, a kernel for each device, and its files where a reader looks for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exportkit.arr_coc.ops import SPECS, OpSpec
from exportkit.arr_coc.ops.triton import SPECS as TRITON_SPECS
from exportkit.libraries import registered_schemas

ROOT = Path(__file__).parents[2]
REGISTERED = sorted(name.removeprefix("arr_coc::") for name in registered_schemas("arr_coc"))
MODULES = sorted(
    path.stem for path in (ROOT / "exportkit" / "arr_coc" / "ops").glob("*.py") if not path.stem.startswith("_")
)


def registrations(suffix: str, call: str) -> list[str]:
    """The operators that the sources of this suffix name in `m.def(` or `m.impl(`, adjacent literals joined."""
    pattern = re.compile(rf'm\.{call}\(\s*"(\w+)')
    return [
        name for path in (ROOT / "csrc" / "arr_coc").glob(f"*/*.{suffix}") for name in pattern.findall(path.read_text())
    ]


def test_every_operator_of_the_dispatcher_has_a_spec_and_every_spec_an_operator():
    assert sorted(SPECS) == REGISTERED


@pytest.mark.parametrize("spec", [*SPECS.values(), *TRITON_SPECS.values()], ids=lambda spec: str(spec.overload))
def test_a_layout_has_every_tensor_of_the_schema_and_the_description_has_the_layout(spec: OpSpec):
    schema, layouts = spec.overload._schema, [layout for _, layout in spec.layout.chain(spec.name)]
    tensors = {argument.name for argument in schema.arguments if "Tensor" in str(argument.type)}
    assert {name for layout in layouts for name in layout.inputs} == tensors
    assert {name for layout in layouts for name in layout.numbers} <= {a.name for a in schema.arguments} - tensors
    assert callable(spec.layout.outputs) or len(spec.layout.results) == len(schema.returns)
    assert spec.layout.describe() in (spec.wrapper.__doc__ or "")


@pytest.mark.parametrize("name", REGISTERED)
def test_an_operator_has_one_schema_in_its_cpu_source_and_one_cuda_kernel(name: str):
    """Where CUDA is not, a kernel is forgotten and a schema in a .cu missing; where both are, a second one aborts."""
    assert registrations("cpp", "def").count(name) == registrations("cu", "impl").count(name) == 1
    assert name not in registrations("cu", "def")


@pytest.mark.parametrize("module", MODULES)
def test_an_operator_module_has_its_four_files_and_a_spec_of_its_name(module: str):
    for suffix in ("h", "cpp", "cu"):
        assert (ROOT / "csrc" / "arr_coc" / module / f"{module}.{suffix}").exists()
    spec = getattr(__import__(f"exportkit.arr_coc.ops.{module}", fromlist=["SPEC"]), "SPEC", None)
    assert isinstance(spec, OpSpec)
    assert spec.name == module


def test_every_folder_of_kernels_belongs_to_a_module():
    assert sorted(path.name for path in (ROOT / "csrc" / "arr_coc").iterdir() if path.is_dir()) == sorted(
        [*MODULES, "common"]
    )


def test_an_operator_in_triton_is_one_module_with_a_spec_of_its_name():
    """What four files are to an operator in C++: kernel, fake and decomposition are one function."""
    folder = ROOT / "exportkit" / "arr_coc" / "ops" / "triton"
    modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert modules == {name.removesuffix("_grad") for name in TRITON_SPECS}
    assert sorted(TRITON_SPECS) == sorted(
        n.removeprefix("arr_coc_triton::") for n in registered_schemas("arr_coc_triton")
    )
