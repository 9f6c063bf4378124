"""A file of torch.export.save is read without unpickling and without evaluating its text, or it is refused.

Each attack is a change of a genuine file. `--trust` gives the file to torch as it is, and shows that the attack works.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

import exportkit
from exportkit.cli import main
from exportkit.package.archive import write_package
from exportkit.package.manifest import Program
from exportkit.package.program_grammar import GrammarError, check_program
from exportkit.program_reader import check_saved, read_program
from tests.package import samples
from tests.package.c_library import build

MODEL, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
CONSTANTS = "data/constants/model_constants_config.json"

Records = dict[str, bytes]
Attack = Callable[[Records, str, Path], None]


class Net(torch.nn.Module):
    """Its program has a symbolic size, a guard, a weight, and a branch, which takes graphs as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x * self.weight,))
        return {"y": y.reshape(-1, 2, 3).reshape(-1)}


@pytest.fixture(scope="module")
def saved() -> Records:
    rows = torch.export.Dim("rows", min=2, max=8)
    program = torch.export.export(Net(), (torch.ones(4, 3),), dynamic_shapes={"x": {0: 2 * rows}})
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(path: Path, records: Records, root: str = "archive/") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(root + name, content)
    return path


class Bomb:
    """Pickled, it runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        import os

        return os.system, (self.command,)


def bomb(command: str) -> bytes:
    buffer = io.BytesIO()
    torch.save(((Bomb(command),), {}), buffer)
    return buffer.getvalue()


def change(records: Records, name: str, edit: Callable[[Any], None]) -> None:
    content = json.loads(records[name])
    edit(content)
    records[name] = json.dumps(content).encode()


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON document."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(each)
    if isinstance(value, dict):
        yield value


# --- the attacks ------------------------------------------------------------------------------------------------------


def example_inputs(records: Records, command: str, folder: Path) -> None:
    records[SAMPLES] = bomb(command)


def text_of_a_size(records: Records, command: str, folder: Path) -> None:
    def edit(program: Any) -> None:
        for each in objects(program):
            if "expr_str" in each:
                each["expr_str"] = f"__import__('os').system('{command}')"

    change(records, MODEL, edit)


def guard(records: Records, command: str, folder: Path) -> None:
    def edit(program: Any) -> None:
        program["guards_code"] = [f"__import__('os').system('{command}') == 0"]

    change(records, MODEL, edit)


def function_of_python(records: Records, command: str, folder: Path) -> None:
    """torch looks a target up among all attributes of torch."""

    def edit(program: Any) -> None:
        node = next(each for each in objects(program) if each.get("target", "").endswith("cond"))
        node |= {"target": "torch.os.system", "inputs": [{"name": "", "arg": {"as_string": command}, "kind": 1}]}

    change(records, MODEL, edit)


def library(records: Records, command: str, folder: Path) -> None:
    """An attribute of torch.ops that is no operator."""
    code = '#include <stdlib.h>\n__attribute__((constructor)) static void start(void) { if (system("%s")) abort(); }'
    path = build(folder, code % command, name="evil.so")

    def edit(program: Any) -> None:
        node = next(each for each in objects(program) if each.get("target", "").endswith("cond"))
        argument = {"name": "", "arg": {"as_string": str(path)}, "kind": 1}
        node |= {"target": "torch.ops.load_library.__call__", "inputs": [argument]}

    change(records, MODEL, edit)


def name_of_a_value(records: Records, command: str, folder: Path) -> None:
    """torch writes it into the source of a function."""
    code = f"x=__import__('os').system('{command}')"

    def edit(program: Any) -> None:
        graph = program["graph_module"]["graph"]
        old = graph["inputs"][-1]["as_tensor"]["name"]
        graph["tensor_values"][code] = graph["tensor_values"].pop(old)
        for each in objects(program):
            if each.get("name") == old:
                each["name"] = code

    change(records, MODEL, edit)


def module_of_an_enumeration(records: Records, command: str, folder: Path) -> None:
    (folder / "evil_enumeration.py").write_text(f"import os\nos.system({command!r})")
    tree = {
        "type": "builtins.dict",
        "context": json.dumps([{"__enum__": True, "fqn": "evil_enumeration:E", "name": "a"}]),
        "children_spec": [{"type": None, "context": None, "children_spec": []}],
    }

    def edit(program: Any) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])

    change(records, MODEL, edit)


def module_of_a_default(records: Records, command: str, folder: Path) -> None:
    (folder / "evil_default.py").write_text(f"import os\nos.system({command!r})")
    context = {"default_factory_module": "evil_default", "default_factory_name": "F", "dict_context": ["y"]}
    leaf = {"type": None, "context": None, "children_spec": []}
    tree = {"type": "collections.defaultdict", "context": context, "children_spec": [leaf]}

    def edit(program: Any) -> None:
        program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])

    change(records, MODEL, edit)


def name_of_an_argument(records: Records, command: str, folder: Path) -> None:
    def edit(program: Any) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"] = [f"x=__import__('os').system('{command}')"]

    change(records, MODEL, edit)


def pickled_object(records: Records, command: str, folder: Path) -> None:
    records["data/constants/opaque_obj_0"] = pickle.dumps(Bomb(command))
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    change(records, CONSTANTS, lambda config: config["config"].update(evil=entry))


def pickled_weight(records: Records, command: str, folder: Path) -> None:
    records["data/weights/weight_0"] = bomb(command)

    def edit(config: Any) -> None:
        for each in config["config"].values():
            each["use_pickle"] = True

    change(records, "data/weights/model_weights_config.json", edit)


def pickled_weights_of_an_older_torch(records: Records, command: str, folder: Path) -> None:
    records["data/weights/model.pt"] = bomb(command)


def compiled_code(records: Records, command: str, folder: Path) -> None:
    """torch.export.load loads what AOTInductor compiled, if there is any."""
    code = '#include <stdlib.h>\n__attribute__((constructor)) static void start(void) { if (system("%s")) abort(); }'
    shared = build(folder, code % command, name="code.so")
    records["data/aotinductor/model/code.wrapper.so"] = shared.read_bytes()
    records["data/aotinductor/model/code.wrapper.cpp"] = b""  # without it, torch 2.11 does not look further
    records["data/aotinductor/model/code.wrapper_metadata.json"] = b'{"AOTI_DEVICE_KEY": "cpu"}'


ATTACKS: list[Attack] = [
    *(example_inputs, text_of_a_size, guard, name_of_a_value, module_of_an_enumeration, module_of_a_default),
    *(pickled_object, pickled_weight, pickled_weights_of_an_older_torch, compiled_code),
]
STOPPED_BY_TORCH: list[Attack] = [function_of_python, library, name_of_an_argument]  # at present, as a bug
if TorchVersion(torch.__version__) < (2, 13):
    STOPPED_BY_TORCH.append(pickled_object)  # it knows no such objects


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "mark"


@pytest.mark.process
@pytest.mark.parametrize("attack", dict.fromkeys([*ATTACKS, *STOPPED_BY_TORCH]), ids=lambda attack: attack.__name__)
def test_nothing_of_a_strangers_program_runs(
    saved: Records, attack: Attack, mark: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records = dict(saved)
    attack(records, f"touch {mark}", tmp_path)
    path = write(tmp_path / "evil.pt2", records)
    out = tmp_path / "out.pt2"
    for command in (
        ["export", str(path), "--format", "program", "-o", str(out)],
        ["bench", str(path), "--device", "cpu", "--seconds", "0.001", "--profile", str(out)],
    ):
        assert main(command) == 3, capfd.readouterr()
        said = capfd.readouterr().err
        assert "could execute a part of it" in said
        assert "--trust" in said
        assert "Logging error" not in said
        assert not mark.exists()
        assert not out.exists()
    main(["export", str(path), "--format", "program", "--trust", "-o", str(out)])
    assert mark.exists() or attack in STOPPED_BY_TORCH, f"the attack is none: {capfd.readouterr()}"
    assert "Logging error" not in capfd.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("attack", [example_inputs, text_of_a_size], ids=lambda attack: attack.__name__)
def test_nothing_of_a_packaged_program_runs(
    saved: Records, attack: Attack, mark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = dict(saved)
    attack(records, f"touch {mark}", tmp_path)
    record = "exportkit/program.pt2"
    program = Program(records={"forward": record}, device="cpu", built_with_torch=str(torch.__version__))
    described = samples.manifest(targets=(), weights=(), libraries=(), operators=(), program=program)
    content = write(tmp_path / "evil.zip", records).read_bytes()
    path = tmp_path / "evil.pt2"
    write_package(path, described, {samples.CASE: samples.RECORDS[samples.CASE], record: content})
    for command in (["verify", str(path)], ["export", str(path), "-o", str(tmp_path / "out.pt2"), "--trust"]):
        assert main(command) == 3
        said = "".join(capsys.readouterr())
        assert "could execute a part of it" in said
        assert not mark.exists()


def test_files_in_the_form_of_older_versions_of_torch_are_refused(saved: Records, mark: Path, tmp_path: Path) -> None:
    """torch.export.load reads them by another reader of archives, and unpickles their parts."""
    records = {"version": b"8.0", "serialized_exported_program.json": saved[MODEL]}
    records |= {
        f"serialized_{part}.pt": bomb(f"touch {mark}") for part in ("state_dict", "constants", "example_inputs")
    }
    path = write(tmp_path / "old.pt2", records, root="")
    assert main(["export", str(path), "--format", "program", "-o", str(tmp_path / "out.pt2")]) in (3, 5)
    assert not mark.exists()


# --- what is read -----------------------------------------------------------------------------------------------------


def test_a_genuine_program_is_read_and_gives_what_torch_reads(saved: Records, tmp_path: Path) -> None:
    path = write(tmp_path / "good.pt2", saved)
    x = torch.randn(6, 3)
    expected = torch.export.load(path).module()(x)
    assert torch.equal(read_program(path).module()(x)["y"], expected["y"])
    assert main(["export", str(path), "--format", "program", "-o", str(tmp_path / "out.pt2")]) == 0


class Own(torch.Tensor):
    """Is pickled by its name."""


def test_a_program_that_cannot_be_read_so_is_not_written(tmp_path: Path) -> None:
    """A tensor of a class of one's own is pickled by torch."""

    class Holding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("own", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.own

    program = torch.export.export(Holding(), (torch.ones(2),))
    program.state_dict["own"] = torch.ones(2).as_subclass(Own)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    with pytest.raises(exportkit.errors.PackageError, match="is a pickle of more than tensors"):
        check_saved(buffer, "it")


def test_a_text_at_a_place_that_is_not_known_is_refused(saved: Records) -> None:
    """A newer torch may evaluate it."""
    program = json.loads(saved[MODEL])
    program["graph_module"]["graph"]["code_of_tomorrow"] = "1"
    with pytest.raises(GrammarError, match="code_of_tomorrow is a text, which torch did not write there so far"):
        check_program(json.dumps(program).encode())


# --- canaries: what is known about torch ------------------------------------------------------------------------------


def test_one_function_reads_programs() -> None:
    root = Path(exportkit.__file__).parent
    callers = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if "torch.export.load(" in path.read_text() or "load_pt2" in path.read_text()
    ]
    assert callers == ["program_reader.py"]


EVALUATE = {"eval", "exec", "compile", "sympify", "import_module", "__import__", "loads", "_pickle_load_obj"}
KNOWN = {
    "_export/serde/serialize.py": {"sympify", "loads", "load"},
    "export/pt2_archive/_package.py": {"_pickle_load_obj", "loads", "load"},
    "export/_unlift.py": {"exec"},
    "export/exported_program.py": set[str](),
    "fx/graph_module.py": {"exec", "compile", "import_module", "__import__", "_load_from_state_dict"},
    "utils/_pytree.py": {"import_module", "loads"},
}


@pytest.mark.parametrize("name", KNOWN)
def test_torch_evaluates_and_unpickles_where_this_is_known(name: str) -> None:
    """If this fails with a new torch: look what text of a file reaches the new place, and give it a rule."""
    tree = ast.parse((Path(torch.__file__).parent / name).read_text())
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {
        function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "") for function in functions
    }
    torch_load = {
        "load"
        for each in functions
        if isinstance(each, ast.Attribute) and ast.unparse(each) in ("torch.load", "pickle.load")
    }
    assert (named & EVALUATE) | torch_load <= KNOWN[name]


def test_every_text_of_torchs_schema_has_a_rule() -> None:
    import dataclasses
    import inspect

    from torch._export.serde import schema

    from exportkit.package.program_grammar import _KEYS, _OBJECTS, _TEXTS

    elsewhere = {
        "config",
        "path_name",
        "library_basename",
        "input_names",
        "output_names",
    }  # no part of a program's JSON
    elsewhere |= {"opset_version", "class_fqn", "custom_obj_name"}  # only keys; only of objects, which are refused
    for _, kind in inspect.getmembers(schema, dataclasses.is_dataclass):
        for field in dataclasses.fields(kind):
            if "str" in str(field.type):
                assert field.name in {*_KEYS, *_OBJECTS, *_TEXTS, *elsewhere}, (kind, field.name)


def test_operators_that_take_the_name_of_a_file_are_refused() -> None:
    from exportkit.package.program_grammar import _check_operator

    for schema in torch._C._jit_get_all_schemas():
        texts = [argument.name for argument in schema.arguments if "str" in str(argument.type)]
        if any("file" in name or "path" in name for name in texts):
            namespace, _, name = schema.name.partition("::")
            for text in (
                f"torch.ops.{namespace}.{name}.{schema.overload_name or 'default'}",
                f"torch.ops.{namespace}.{name}",
            ):
                with pytest.raises(GrammarError):
                    _check_operator(text)


def test_guards_may_call_the_functions_of_sizes_that_torch_writes() -> None:
    """torch 2.15 writes torch.sym_max where older ones wrote max."""
    from exportkit.package.program_grammar import check_guard

    check_guard("L['image'].size()[3] != torch.sym_max(1, L['image'].size()[3] // 8)")
    check_guard("math.sqrt(torch.sym_min(2, torch.sym_float(L['x'].stride()[0]))) > 1")
    for text in (
        "torch.os.system('true') == 0",
        "torch.sym_max.__globals__ == 0",
        "torch.load('file') == 0",
        "math.sym_max(1, 2) == 2",
        "L['x'].sym_max(1) == 2",
    ):
        with pytest.raises(GrammarError):
            check_guard(text)
