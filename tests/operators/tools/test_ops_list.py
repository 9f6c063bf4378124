"""`exportkit ops list`: what is registered, and what a library needs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from exportkit.cli import main
from exportkit.errors import LibraryLoadError, UsageError
from exportkit.libraries import host_platform
from exportkit.operators.tools.listing import describe_file
from exportkit.operators.tools.source import OperatorSource, _variant, parse_source
from tests.built import operator_library
from tests.operators.tools.conftest import INJECTED, misbehaving


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


@pytest.mark.process
def test_our_own_operators_have_fakes_gradients_and_autocast_rules(capsys):
    assert main(["ops", "list", "exportkit.arr_coc"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.startswith("  arr_coc::")}
    assert rows["arr_coc::softmax"][:4] == ["cpu", "register_fake", "autograd", "kernel"]
    assert "arr_coc::muladd(Tensor a, Tensor b, float c) -> Tensor" in said
    assert "2.11 or newer (stable ABI)" in said
    assert str(operator_library("cpu")) in said


@pytest.mark.process
def test_operators_in_python_are_told_from_those_in_c(ops):
    _, document = ops("list", INJECTED)
    operators = {operator["name"]: operator for operator in document["operators"]}
    assert operators["injected::good"]["in_python"]
    assert operators["injected::good"]["fake"] == "register_fake"
    assert document["files"] == []


def test_symbols_of_torchs_cpp_are_beyond_the_stable_abi():
    """torch's own libraries need its C++."""
    listed = describe_file(Path(torch.__file__).parent / "lib" / "libtorch_python.so")
    assert listed.cpp
    assert listed.needs_torch is None
    assert any(symbol.startswith("_ZN2at") for symbol in listed.beyond)


def hub_kernel(folder: Path, *variants: str) -> Path:
    """A kernel repository of the Hugging Face hub, with an operator in a namespace that has a hash."""
    for number, variant in enumerate(variants):
        package = folder / "build" / variant
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from ._ops import ops\n")
        (package / "_ops.py").write_text(
            textwrap.dedent(f"""
                import torch

                library = torch.library.Library("_scale_cpu_abc{number}", "DEF")
                library.define("scale(Tensor x, float by) -> Tensor")
                library.impl("scale", lambda x, by: x * by, "CPU")
                ops = torch.ops._scale_cpu_abc{number}
            """)
        )
    return folder


def this_torch() -> str:
    return "torch" + "".join(torch.__version__.split(".")[:2])


HOST = "-".join(reversed(host_platform().split("-")))


def test_a_build_for_another_cuda_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.2")
    builds = [f"{this_torch()}-cxx11-{backend}-{HOST}" for backend in ("cu118", "cu130", "cu131", "cu133", "cpu")]
    hub_kernel(tmp_path, *builds)
    assert _variant(tmp_path).name == builds[2]


@pytest.mark.process
def test_a_kernel_of_the_hugging_face_hub_is_listed_from_the_build_for_this_torch(ops, tmp_path):
    fitting = f"{this_torch()}-cxx11-cpu-{HOST}"
    folder = hub_kernel(
        tmp_path / "scale-kernel", f"torch19-cxx11-cpu-{HOST}", fitting, f"{this_torch()}-cxx11-cu118-{HOST}"
    )
    code, document = ops("list", folder)
    assert code == 0
    (operator,) = document["operators"]
    assert operator["name"] == "_scale_cpu_abc1::scale"
    assert operator["fake"] is None


def test_of_the_builds_for_this_machine_the_one_for_this_torch_comes_first(tmp_path):
    exact, stable, any_torch = f"{this_torch()}-cpu-{HOST}", f"torch-stable-abi211-cpu-{HOST}", "torch-universal"
    newer = f"torch-stable-abi399-cpu-{HOST}"
    hub_kernel(tmp_path, exact, stable, any_torch, newer, "torch-cpu-windows")
    assert _variant(tmp_path).name == exact
    for path in (tmp_path / "build" / exact).iterdir():
        path.unlink()
    (tmp_path / "build" / exact).rmdir()
    assert _variant(tmp_path).name == stable
    with pytest.raises(UsageError, match=r"no build for torch .* it has torch-stable-abi399"):
        _variant(hub_kernel(tmp_path / "other", newer))
    with pytest.raises(UsageError, match="has no __init__"):
        _variant(tmp_path / "nothing")


def test_a_source_is_a_file_a_folder_a_module_or_a_model(tmp_path):
    (tmp_path / "library.so").touch()
    assert parse_source(str(tmp_path / "library.so"), models=False).kind == "file"
    assert parse_source(str(tmp_path), models=False).kind == "folder"
    assert parse_source("my_package.ops", models=False) == OperatorSource("module", "my_package.ops")
    assert parse_source("ops.py", models=False).kind == "module"
    assert parse_source("net.py:Net", models=True).kind == "model"
    with pytest.raises(UsageError, match="is a model, not an operator library"):
        parse_source("net.py:Net", models=False)


@pytest.mark.process
def test_a_library_that_cannot_be_loaded_says_why(tmp_path, capsys):
    (tmp_path / "text.so").write_text("no library")
    assert main(["ops", "list", str(tmp_path / "text.so")]) == 2
    assert "is not an ELF shared library" in capsys.readouterr().err
    (tmp_path / "ends.py").write_text("import os\nprint('goodbye', flush=True)\nos.abort()\n")
    assert main(["ops", "list", str(tmp_path / "ends.py")]) == LibraryLoadError.exit_code
    said = capsys.readouterr().err
    assert "SIGABRT" in said
    assert "goodbye" in said
