"""MODEL: what the command line may name, what it hears if it names something else, and who signed a program."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exportkit import ExportSpec
from exportkit.errors import (
    DigestMismatchError,
    ExportError,
    ModelNotFoundError,
    SignatureMissingError,
    UsageError,
    WeightsError,
)
from exportkit.export.artifact import export_program
from exportkit.export.models.missing_operators import advice
from exportkit.export.models.program_file import load_program
from exportkit.export.models.resolve import parse_input, resolve
from exportkit.export.record.cases import state_sha256
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from exportkit.verify.options import VerifyOptions
from exportkit.verify.verify import verify
from tests.artifacts import artifact
from tests.package.signers import signer, write_policy

HERE = Path(__file__).parent
MODELS = str(HERE / "export_models.py")
X = ["x=float32[2,4]"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, under a name no other test uses."""
    name = f"models_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text("import torch\n\nnet = torch.nn.Linear(3, 2)\n")
    (tmp_path / f"{name}_broken.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_a_callable_that_returns_a_spec_gets_the_keyword_arguments() -> None:
    resolved = resolve(f"{MODELS}:patches", model_kwargs={"width": 4})
    assert resolved.spec.model.embed.shape == (192, 4)
    assert (resolved.name, resolved.model_kwargs) == (f"{MODELS}:patches", {"width": 4})


def test_a_module_of_the_working_directory_is_found(package: str) -> None:
    assert isinstance(resolve(f"{package}:net", inputs=["input=float32[2,3]"]).spec.model, torch.nn.Linear)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_callers_generator_alone() -> None:
    state = torch.get_rng_state()
    digests = [state_sha256(resolve(f"{MODELS}:patches", seed=seed).spec.model) for seed in (3, 3, 4)]
    assert digests[0] == digests[1] != digests[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_that_an_import_draws_do_not_change_the_model(package: str) -> None:
    Path(f"{package}_draws.py").write_text(
        "import torch\n\nfirst = torch.rand(3)\n\ndef net():\n    return torch.nn.Linear(3, 2)\n"
    )
    models = [resolve(f"{package}_draws:net", inputs=["input=float32[2,3]"]).spec.model for _ in range(2)]
    assert state_sha256(models[0]) == state_sha256(models[1])


def test_an_input_replaces_the_specs_own_and_the_others_stay() -> None:
    spec = resolve(f"{MODELS}:patches", inputs=["image=float32[3,3,80,48]"]).spec
    assert [tuple(t.shape) for t in spec.example_inputs] == [(3, 3, 80, 48), (2, 6)]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("arr-coc:x", "no module"),
        ("no_such_module:net", "no module 'no_such_module'"),
        ("nothing.pt2", "no file"),
        (f"{MODELS}:not_a_model", "returned a int"),
        (f"{MODELS}:", "is not a model"),
    ],
)
def test_what_is_no_model_is_refused_with_what_would_be_one(model: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        resolve(model)


def test_a_module_that_imports_what_is_not_installed_says_what(package: str) -> None:
    with pytest.raises(ModelNotFoundError, match="imports 'no_such_package'"):
        resolve(f"{package}_broken:net")


def test_keyword_arguments_that_do_not_fit_are_refused_with_the_signature() -> None:
    with pytest.raises(UsageError, match=r"unexpected keyword argument 'depth'\n.*width=6.*forward of an nn.Module"):
        resolve(f"{MODELS}:patches", model_kwargs={"depth": 1})
    with pytest.raises(UsageError, match="needs a callable"):
        resolve(f"{MODELS}:dropout", model_kwargs={"depth": 1})
    with pytest.raises(UsageError, match="width is a list"):
        resolve(f"{MODELS}:patches", model_kwargs={"width": [1]})


def test_inputs_of_integers_are_zeros_and_ones() -> None:
    name, ids = parse_input("ids=int64[4,5]")
    assert (name, ids.dtype, ids.shape) == ("ids", torch.int64, (4, 5))
    assert set(ids.flatten().tolist()) <= {0, 1}


def test_weights_fill_every_parameter_and_those_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file, whole = tmp_path / "w.safetensors", {"linear.weight": torch.rand(4, 4), "linear.bias": torch.rand(4)}
    with pytest.raises(WeightsError, match="no weights file"):
        resolve(f"{MODELS}:Dropout", inputs=X, weights=file)
    for tensors, named in (
        ({"linear.weight": whole["linear.weight"]}, "linear.bias"),
        ({**whole, "linear.bias": torch.rand(3)}, "linear.bias"),
        ({**whole, "more": torch.rand(1)}, "more"),
    ):
        save_file(tensors, file)
        with pytest.raises(WeightsError, match=named):
            resolve(f"{MODELS}:Dropout", inputs=X, weights=file)
    save_file(whole, file)
    model = resolve(f"{MODELS}:Dropout", inputs=X, weights=file).spec.model
    assert torch.equal(model.linear.bias, whole["linear.bias"])


def test_a_program_takes_no_options_that_would_change_it() -> None:
    with pytest.raises(UsageError, match="--model-kwargs, --input"):
        resolve("x.pt2", model_kwargs={"a": 1}, inputs=["x=float32[1]"])


def test_a_signature_is_asked_of_a_program_alone(tmp_path: Path) -> None:
    for trust in (Trust([tmp_path / "key.pem"]), Trust(signature=tmp_path / "x.sig")):
        with pytest.raises(UsageError, match="arr-coc is Python source"):
            resolve("arr-coc", trust=trust)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "def f():\n    raise RuntimeError('no licence')",
            r"making .*:f failed at own.py:2 in f: .*RuntimeError: no licence",
        ),
        ("def f():\n    raise SystemExit(0)", r"making .*:f failed at own.py:2 in f: .*SystemExit: 0"),
        ("import torch\ndef f(:", r"importing .*SyntaxError: .*\(own.py, line 2\)"),
        (
            "import torch\ntorch.ops.load_library(__file__)",
            r"Could not load this library: .* \(because of OSError: .*file too short\)",
        ),
    ],
)
def test_what_the_callers_own_code_raises_is_told_as_such(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ExportError, match=said):
        resolve(f"{tmp_path}/own.py:f")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": abs}, "model is <built-in function abs>; it must be an nn.Module"),
        ({"example_inputs": torch.rand(2, 3)}, "example_inputs is a Tensor; it must be a tuple"),
        ({"dynamic_shapes": {"x": "n[1:4]"}}, r"dynamic_shapes is {'x': 'n\[1:4\]'}; it must be such as"),
        ({"dynamic_shapes": torch.export.Dim("n")}, "dynamic_shapes is .*; it must be such as"),
        ({"operator_libraries": "lib.so"}, "operator_libraries is 'lib.so'; it must be a list"),
    ],
)
def test_a_spec_with_a_field_of_another_type_is_refused_where_it_is_made(fields, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ExportSpec(**{"model": torch.nn.Identity(), "example_inputs": (), **fields})


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["x=float32[2,4]", "x=float32[3,4]"], r"--input x is given twice: \[2, 4\] and \[3, 4\]"),
        (["x=float32[9000000,9000000]"], "cannot make the input 'x=.*allocate"),
        (["x=float32[2]", "x.a=float32[2]"], "--input x.a: a parameter is a tensor or has tensors inside, not both"),
        (["x.a=float32[2]", "x=float32[2]"], "--input x: a parameter is a tensor or has tensors inside, not both"),
        (["x.1=float32[2]"], "--input x: the places in a list are 0, 1, 2 and so on; given are 1"),
        (["x.0=float32[2]", "x.a=float32[2]"], "--input x: the places in a list are .*; given are 0, a"),
    ],
)
def test_inputs_that_cannot_be_made_are_refused(inputs: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(f"{MODELS}:Dropout", inputs=inputs)


def test_inputs_with_dots_are_dicts_and_lists() -> None:
    texts = ["x.mask=bool[3]", "x.past.1.k=float32[2]", "x.past.0.k=float16[1]"]
    (x,) = resolve(f"{MODELS}:Dropout", inputs=texts).spec.example_inputs
    assert {key: type(each) for key, each in x.items()} == {"mask": torch.Tensor, "past": list}
    assert [{name: tensor.shape[0] for name, tensor in each.items()} for each in x["past"]] == [{"k": 1}, {"k": 2}]


def test_an_installed_library_whose_operators_do_not_load_needs_another_build() -> None:
    found = importlib.metadata.version("numpy")
    said = advice("numpy::nms")
    assert said.startswith(f"numpy {found} is installed, but its operators do not load")
    assert said.endswith(f"install its build for torch {torch.__version__}")
    assert "--op-library PATH|MODULE" in advice("net::nms")


# --- programs are held against policies before torch reads, and may unpickle, any of them ----------------------------


def test_a_signed_program_is_read_and_run_where_a_policy_asks_for_signatures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, release = Path(shutil.copy(artifact("patches-program"), tmp_path / "program.pt2")), signer(tmp_path)
    monkeypatch.setenv("EXPORTKIT_POLICY", str(write_policy(tmp_path / "policy.json", release.public)))
    with pytest.raises(SignatureMissingError):
        load_program(path)
    assert verify(path, VerifyOptions(against="cases")).exit_code == 3
    sign_package(path, release.key)
    assert load_program(path).programs
    report = verify(path, VerifyOptions(against="cases"))
    assert report.exit_code == 0
    assert report.checks[0].verdict.kind == "signed"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(artifact("patches-program"), tmp_path / "program.pt2"))


def test_a_program_is_read_where_the_key_that_the_caller_names_has_signed_it(path: Path, tmp_path: Path) -> None:
    release, stranger = signer(tmp_path), signer(tmp_path, "stranger")
    keys = [release.public]
    with pytest.raises(SignatureMissingError):
        resolve(str(path), trust=Trust(keys))
    signature = sign_package(path, release.key)
    with pytest.raises(SignatureMissingError):
        resolve(str(path), trust=Trust([stranger.public]))
    assert resolve(str(path), trust=Trust([stranger.public, *keys])).programs
    moved = signature.rename(tmp_path / "elsewhere.sig")
    with pytest.raises(SignatureMissingError):
        resolve(str(path), trust=Trust(keys))
    assert resolve(str(path), trust=Trust(keys, moved)).programs
    with pytest.raises(UsageError, match="without a public key"):
        resolve(str(path), trust=Trust(signature=moved))


def test_cases_of_another_package_do_not_take_the_place_of_the_signed_ones(path: Path, tmp_path: Path) -> None:
    release = signer(tmp_path)
    sign_package(path, release.key)
    resolved = resolve(str(path), trust=Trust([release.public]))
    with PackageReader(path) as reader:
        records = {name: reader.read(name) for name in reader.names}
        first, second = (case.record for case in reader.manifest.cases[:2])
        records[first], records[second] = records[second], records[first]
        write_package(path, reader.manifest, records)
    with pytest.raises(DigestMismatchError, match="another package"):
        export_program(resolved, tmp_path / "out.pt2")
    assert not (tmp_path / "out.pt2").exists()
