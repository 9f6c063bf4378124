"""The digest of what compiled code depends on: everything that reaches the code changes it, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config

from exportkit.export.compile import compile_key as keys
from exportkit.export.compile.compile_key import compile_key
from exportkit.export.compile.program_fingerprint import UnknownPartError, encoded
from exportkit.precision import with_tf32
from tests.export.function_models import CPU, FunctionModel
from tests.subprocesses import run_python

OPTIONS: dict[str, Any] = {
    "cpp.cxx": ("g++",),
    "cpp.simdlen": 256,
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.output_path": "/tmp/one",
}


class Model(torch.nn.Module):
    """Every kind of thing that a program may have."""

    def __init__(self, *, factor: float = 2.0, constant: float = 1.0, width: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, width)
        self.other = torch.nn.Linear(8, width)
        if tied:
            self.other.weight = self.linear.weight
        self.factor, self.constant = factor, torch.full((3, 1), constant)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.linear(x) * self.factor + self.other(x), "z": x.sum() + self.constant}


def program(
    model: torch.nn.Module | None = None,
    *,
    rows: int = 4,
    most: int | None = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> torch.export.ExportedProgram:
    if model is None:
        torch.manual_seed(seed)
        model = Model()
    sizes = ({0: torch.export.Dim("rows", min=2, max=most)},) if most else None
    return torch.export.export(model.to(dtype), (torch.zeros(rows, 8, dtype=dtype),), dynamic_shapes=sizes)


def key(of: torch.export.ExportedProgram | None = None, *, outside: bool = True, **options: Any) -> str:
    more = {"isa": "x86-64-v3", "tf32": False}
    return compile_key(of or program(), CPU, OPTIONS | options, weights={"w": "00"} if outside else None, **more)


@pytest.fixture(scope="module")
def plain() -> str:
    return key()


def test_a_program_that_is_traced_again_has_the_same_key(plain: str) -> None:
    assert key() == plain
    assert key(**{"aot_inductor.output_path": "/tmp/another"}) == plain


@pytest.mark.slow
def test_another_process_finds_the_same_key(plain: str, tmp_path: Path) -> None:
    code = "from tests.export.test_compile_key import key; print(key())"
    root = str(Path(__file__).parents[2])
    found = {run_python(code, cwd=tmp_path, PYTHONPATH=root, PYTHONHASHSEED=seed).strip() for seed in ("1", "2")}
    assert len(found) == 1


PROGRAMS: dict[str, Callable[[], torch.export.ExportedProgram]] = {
    "a number": lambda: program(Model(factor=2.5)),
    "a constant": lambda: program(Model(constant=3.0)),
    "a shape": lambda: program(Model(width=9)),
    "tied weights": lambda: program(Model(tied=True)),
    "a range": lambda: program(most=32),
    "no range": lambda: program(most=None),
    "an example's size": lambda: program(rows=5),
    "a dtype": lambda: program(dtype=torch.float64),
    "an operator": lambda: program(torch.nn.Sequential(Model().linear, torch.nn.GELU())),
    "an operator's argument": lambda: program(torch.nn.Sequential(Model().linear, torch.nn.GELU("tanh"))),
}


def test_every_part_of_a_program_counts(plain: str) -> None:
    found = {"plain": plain, **{name: key(make()) for name, make in PROGRAMS.items()}}
    assert len(set(found.values())) == len(found), found


def test_strides_of_weights_count(plain: str) -> None:
    model = Model()
    model.linear.weight = torch.nn.Parameter(torch.zeros(8, 8).t())
    assert key(program(model)) != plain


def test_values_of_weights_count_where_the_code_has_them(plain: str) -> None:
    other = program(seed=1)
    assert key(other) == plain
    assert len({plain, key(outside=False), key(other, outside=False)}) == 3


def other_value(value: Any) -> Any:
    """Returns a value of an option that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, (list, tuple)):
        return [*value, "more"]
    return {"more": 1} if isinstance(value, dict) else "another"


@pytest.mark.slow
def test_every_option_of_inductor_counts(plain: str) -> None:
    """One by one, set in the process or given to the compiler. Left out are folders, and how many compile at a time."""
    traced, names = program(), {}
    for name, value in config.get_config_copy().items():
        if name in ("aot_inductor.custom_op_libs", *keys.WITH_SOURCE_LINES):
            continue
        names[name] = key(traced, **{name: other_value(OPTIONS.get(name, value))})
    same = {name for name, found in names.items() if found == plain}
    assert same == {name for name in config.get_config_copy() if keys._UNUSED_OPTIONS.search(name)}
    assert len(same) < 15
    with config.patch(epilogue_fusion=not config.epilogue_fusion):
        assert key(traced) != plain


@contextmanager
def deterministic_with_another_thread(*, deterministic: bool, more: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + more)
    torch.use_deterministic_algorithms(deterministic)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "setting",
    [
        partial(deterministic_with_another_thread, deterministic=False, more=1),
        partial(deterministic_with_another_thread, deterministic=True, more=0),
        partial(with_tf32, True),
        torch.no_grad,
        lambda: torch.backends.mkldnn.flags(enabled=False),
    ],
)
def test_settings_of_the_process_count(plain: str, setting: Callable[[], Any]) -> None:
    traced = program()
    with setting():
        assert key(traced) != plain


def test_variables_that_reach_compilers_count_and_no_others(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = ("TORCHINDUCTOR_FREEZING", "CPATH", "CXX", "TRITON_PTXAS_PATH", "ATEN_CPU_CAPABILITY")
    others = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_LOGS", "HOME", "TMPDIR")
    traced = program()
    for name in (*counted, *others):
        with monkeypatch.context() as patched:
            patched.setenv(name, "/another")
            assert (key(traced) == plain) is (name in others), name


def test_another_compiler_counts(plain: str, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    found = set()
    for version in (1, 2):
        compiler.write_text(f"#!/bin/sh\necho {version}\n")
        compiler.chmod(0o755)
        keys._tool.cache_clear()
        found.add(key(**{"cpp.cxx": (str(compiler),)}))
    assert len({plain, *found}) == 3


def test_versions_and_sources_count(plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_, own = tmp_path / "torch", tmp_path / "exportkit"
    (torch_ / "_inductor").mkdir(parents=True)
    (own / "export").mkdir(parents=True)
    (torch_ / "__init__.py").touch()
    monkeypatch.setattr(torch, "__file__", str(torch_ / "__init__.py"))
    monkeypatch.setattr(keys, "OWN_SOURCES", own)
    traced, found = program(), {plain}
    for change in (
        lambda: None,
        lambda: (torch_ / "_inductor" / "ir.py").write_text("1"),
        lambda: (torch_ / "_inductor" / "ir.py").write_text("12"),
        lambda: (own / "export" / "packed_weights.py").write_text("1"),
        lambda: (own / "export" / "packed_weights.py").write_text("2"),
        lambda: monkeypatch.setattr(torch, "__version__", "2.99"),
        lambda: monkeypatch.setattr(keys, "__version__", "99"),
        lambda: monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
    ):
        change()
        keys._software.cache_clear()
        found.add(key(traced))
    keys._software.cache_clear()
    assert len(found) == 9


def test_the_kind_of_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: there is a GPU."""
    traced, found = program(), set()
    one = {"name": "one", "major": 9, "minor": 0, "multi_processor_count": 132}
    kinds = [one, one | {"minor": 1}, one | {"name": "another"}, one | {"multi_processor_count": 114}]
    for kind in kinds:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, kind=kind: SimpleNamespace(**kind))
        found.add(compile_key(traced, torch.device("cuda"), OPTIONS, weights={}))
    assert len(found) == len(kinds)


def test_what_has_no_text_has_no_key() -> None:
    traced = program()
    given = ({"post_grad_custom_pre_pass": lambda graph: graph}, {"aot_inductor.custom_op_libs": ["mine"]})
    for options in (*given, *({name: True} for name in keys.WITH_SOURCE_LINES)):
        with pytest.raises(UnknownPartError):
            key(traced, **options)
    node = next(iter(traced.graph.nodes))
    node.meta["mine"] = object()
    with pytest.raises(UnknownPartError, match=r"builtins\.object"):
        key(traced)
    del node.meta["mine"]


def test_a_tensor_of_torch_func_has_no_key() -> None:
    """Stacked modules under vmap leave one in the graph: the export ended as a bug."""
    with pytest.raises(UnknownPartError, match="without memory of its own"):
        torch.vmap(lambda x: encoded(x) and x)(torch.rand(2, 3))


def test_custom_operators_count_by_their_schemas_and_not_if_they_are_taken_apart() -> None:
    found = set()
    for schema in ("(Tensor x, int n=1) -> Tensor", "(Tensor x, int n=2) -> Tensor"):
        with torch.library._scoped_library("compile_key", "DEF") as library:
            library.define(f"called{schema}")
            library.impl("called", lambda x, n=1: x.clone(), "CPU")
            library.impl("called", lambda x, n=1: torch.empty_like(x), "Meta")
            found.add(key(program(FunctionModel(lambda x: torch.ops.compile_key.called(x)))))
    assert len(found) == 2

    @torch.library.triton_op("compile_key::apart", mutates_args=())
    def apart(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(UnknownPartError, match="compile_key::apart, which is taken apart"):
        key(program(FunctionModel(lambda x: torch.ops.compile_key.apart(x))))
