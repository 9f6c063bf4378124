"""`exportkit ops list`: what is registered, and what a library needs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from exportkit.cli import main
from exportkit.errors import LibraryLoadError
from exportkit.operators.tools.listing import describe_file
from tests.built import operator_library
from tests.operators.tools.conftest import INJECTED, misbehaving
from tests.package.c_library import PRELUDE, build


def test_a_shared_library_is_listed_with_what_it_lacks_and_needs(ops):
    library = misbehaving().resolve()
    code, document = ops("list", library)
    assert code == 0
    (operator,) = document["operators"]
    assert operator["name"] == "misbehaving::act"
    assert operator["schema"] == "misbehaving::act(Tensor x) -> Tensor"
    assert operator["devices"] == ["cpu"]
    assert (operator["fake"], operator["gradient"], operator["autocast"]) == (None, None, [])
    assert not operator["in_python"]
    (file,) = document["files"]
    assert (file["path"], file["cpp"], file["needs_torch"], file["beyond"]) == (str(library), False, "2.11", [])


@pytest.mark.slow
def test_our_own_operators_have_fakes_gradients_and_autocast_rules(capsys):
    assert main(["ops", "list", "exportkit.arr_coc"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.startswith("  arr_coc::")}
    assert rows["arr_coc::softmax"][:4] == ["cpu", "register_fake", "autograd", "kernel"]
    assert "arr_coc::muladd(Tensor a, Tensor b, float c) -> Tensor" in said
    assert "2.11 or newer (stable ABI)" in said
    assert str(operator_library("cpu")) in said


def test_operators_in_python_are_told_from_those_in_c(ops):
    _, document = ops("list", INJECTED)
    operators = {operator["name"]: operator for operator in document["operators"]}
    assert operators["injected::good"]["in_python"]
    assert operators["injected::good"]["fake"] == "register_fake"
    assert document["files"] == []


def test_an_operator_that_needs_no_fake_needs_none_by_list_and_by_check(ops, tmp_path):
    file = tmp_path / "writers.py"
    file.write_text(
        textwrap.dedent("""
            import torch

            library = torch.library.Library("writers", "DEF")
            library.define("plain(Tensor(a!) x, Tensor y) -> ()")
            library.define("faked(Tensor(a!) x, Tensor y) -> ()")

            def alike(x, y):
                torch._check(x.shape == y.shape and x.dtype == y.dtype, lambda: "x and y must be alike")

            def write(x, y):
                alike(x, y)
                x.copy_(y)

            library.impl("plain", write, "CPU")
            library.impl("faked", write, "CPU")

            @torch.library.register_fake("writers::faked", lib=library)
            def _(x, y):
                alike(x, y)
        """)
    )
    fakes = {operator["name"]: operator["fake"] for operator in ops("list", file)[1]["operators"]}
    assert fakes == {"writers::faked": "register_fake", "writers::plain": "not needed"}
    code, document = ops("check", file, "--only", "refuses-alike")
    faked, plain = (each["report"] for each in document["operators"])
    (finding,) = plain["findings"]
    assert code == 0
    assert "torch needs no fake kernel of it" in finding["message"]
    assert '@torch.library.register_fake("writers::plain")' in finding["hint"]
    assert faked["passed"] == ["refuses-alike"], "what is advised works"


def test_symbols_of_torchs_cpp_are_beyond_the_stable_abi():
    """torch's own libraries need its C++."""
    listed = describe_file(Path(torch.__file__).parent / "lib" / "libtorch_python.so")
    assert listed.cpp
    assert listed.needs_torch is None
    assert any(symbol.startswith("_ZN2at") for symbol in listed.beyond)


@pytest.mark.slow
def test_a_kernel_of_the_hugging_face_hub_is_listed_from_the_folder_of_its_build(ops, tmp_path, capsys):
    """Its operators are in a namespace that has a hash."""
    package = tmp_path / "scale-kernel" / "build" / "torch213-cxx11-cpu-x86_64-linux"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from ._ops import ops\n")
    (package / "_ops.py").write_text(
        textwrap.dedent("""
            import torch

            library = torch.library.Library("_scale_cpu_abc1", "DEF")
            library.define("scale(Tensor x, float by) -> Tensor")
            library.impl("scale", lambda x, by: x * by, "CPU")
            ops = torch.ops._scale_cpu_abc1
        """)
    )
    code, document = ops("list", package)
    assert code == 0
    (operator,) = document["operators"]
    assert operator["name"] == "_scale_cpu_abc1::scale"
    assert operator["fake"] is None
    assert main(["ops", "list", str(tmp_path / "scale-kernel")]) == 2
    assert "has no __init__.py" in capsys.readouterr().err


def test_a_schema_that_export_cannot_take_is_named(tmp_path, capsys):
    body = 'define("odd_schemas", "f(Tensor x, Scalar by) -> Tensor"); '
    body += 'define("odder_schemas", "g(Tensor! x, complex by, Device at=\\"cpu\\") -> ()"); '  # torch cannot read it
    library = build(tmp_path, PRELUDE + f"__attribute__((constructor)) static void start(void) {{ {body}}}\n")
    assert main(["ops", "list", str(library)]) == 0
    printed = capsys.readouterr().out
    assert "  odd_schemas::f(Tensor x, Scalar by) -> Tensor\n" in printed
    assert "odd_schemas::f: Argument by is Scalar, and the stable ABI cannot pass that." in printed
    assert "  odder_schemas::g(Tensor! x, complex by, Device at=cpu) -> ()\n" in printed
    assert "odder_schemas::g: Argument by is complex, and the stable ABI cannot pass that." in printed


def test_a_library_that_cannot_be_loaded_says_why(tmp_path, capsys):
    (tmp_path / "text.so").write_text("no library")
    assert main(["ops", "list", str(tmp_path / "text.so")]) == 2
    assert "is not an ELF shared library" in capsys.readouterr().err
    assert main(["ops", "list", "net.py:Net"]) == 2
    assert "is a model, not an operator library" in capsys.readouterr().err
    (tmp_path / "ends.py").write_text("import os\nprint('goodbye', flush=True)\nos.abort()\n")
    assert main(["ops", "list", str(tmp_path / "ends.py")]) == LibraryLoadError.exit_code
    said = capsys.readouterr().err
    assert "SIGABRT" in said
    assert "goodbye" in said
