"""A package that is changed: what is replaced, what stays byte for byte, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load, save_file

from exportkit.errors import (
    MissingLibraryError,
    SchemaChangedError,
    SignatureMissingError,
    UsageError,
    WeightsError,
)
from exportkit.export.record.cases import state_sha256
from exportkit.package import manifest as m
from exportkit.package.archive import STOCK_RECORDS, PackageReader, StoredRecord, write_package
from exportkit.package.assemble import assemble
from exportkit.package.describe_library import describe_with_needed
from exportkit.package.signing import sign_package
from exportkit.package.trust import Trust
from exportkit.packaging import PackOptions
from exportkit.repack.repacking import Changes, Repacked, repack
from exportkit.verify.options import VerifyOptions
from tests.artifacts import ROOT, artifact, runs_op_shapes
from tests.commands import run
from tests.export.weights_models import Weighted
from tests.fixtures import stable_library
from tests.package import samples
from tests.package.signers import package as sample_package
from tests.package.signers import signer

MODEL = "tests/export/weights_models.py:weighted"
SOURCE = ROOT / "tests" / "export" / "op_shapes.cpp"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "exportkit-cache"))


def unverified(package: Path, changes: Changes, **more: Any) -> Repacked:
    """Repacks without running the package."""
    return repack(package, package.with_name("out.pt2"), changes, PackOptions(VerifyOptions(**more), verify=False))


def digests(path: Path) -> dict[str, str]:
    with PackageReader(path) as reader:
        reader.verify()
        return {record.name: record.sha256 for record in reader.manifest.records}


def rewritten(path: Path, out: Path, *, records: Mapping[str, bytes] | None = None, **changes: Any) -> Path:
    """A package with other manifest keys and more records."""
    with PackageReader(path) as reader:
        kept = {name: StoredRecord(reader, name) for name in reader.names if name not in STOCK_RECORDS}
        write_package(out, msgspec.structs.replace(reader.manifest, **changes), {**kept, **(records or {})})
    return out


# --- without running anything -----------------------------------------------------------------------------------------


def test_all_but_what_is_replaced_stays_byte_for_byte(tmp_path: Path) -> None:
    package = sample_package(tmp_path)
    before = package.read_bytes()
    changed = unverified(package, Changes(version="2"))
    assert digests(tmp_path / "out.pt2") == digests(package)
    assert changed.manifest.version == "2"
    assert (changed.report, changed.done) == (None, ())
    with PackageReader(package) as old, PackageReader(tmp_path / "out.pt2") as new:
        assert new.manifest == msgspec.structs.replace(old.manifest, version="2")
    assert package.read_bytes() == before


def test_a_package_may_take_its_own_place(tmp_path: Path) -> None:
    package = sample_package(tmp_path)
    repack(package, package, Changes(version="2"), PackOptions(verify=False))
    with PackageReader(package) as reader:
        reader.verify()
        assert reader.manifest.version == "2"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "model"))] == ["model.pt2"]


def test_a_target_is_left_out_with_what_only_it_needs(tmp_path: Path) -> None:
    own = b"\0" * 24
    import hashlib

    record = f"data/weights/{hashlib.sha256(own).hexdigest()}"
    kernels = msgspec.structs.replace(
        samples.manifest().libraries[0],
        record="exportkit/ops/linux-x86_64/libtoy_cuda.so",
        sha256=hashlib.sha256(b"\x7fELF cuda").hexdigest(),
        device="cuda",
        kernels=("cuda",),
        defines=(),
    )
    gpu = samples.target(
        name="gpu",
        device="cuda",
        cpu_isa=None,
        cuda_architecture="sm_90",
        constants={"forward": {"c": "c@00", "head.weight": "head.weight"}},
    )
    constant = samples.weight(name="c@00", aliases=(), state=False, record=record)
    path = tmp_path / "two.pt2"
    records = {
        **samples.RECORDS,
        "data/aotinductor/gpu/model.wrapper.so": b"\x7fELF gpu",
        record: own,
        kernels.record: b"\x7fELF cuda",
    }
    manifest = samples.manifest()
    write_package(
        path,
        msgspec.structs.replace(
            manifest,
            targets=(*manifest.targets, gpu),
            weights=(*manifest.weights, constant),
            libraries=(*manifest.libraries, kernels),
        ),
        records,
    )
    changed = unverified(path, Changes(drop_targets=["gpu"]))
    alone = sample_package(tmp_path)
    assert (tmp_path / "out.pt2").read_bytes() == alone.read_bytes()
    assert changed.done == ("left out target gpu", f"left out {kernels.record}: no target needs it")
    with pytest.raises(UsageError, match="no target tpu") as refused:
        unverified(path, Changes(drop_targets=["tpu"]))
    assert str(refused.value.hint) == "The package has cpu_v3, gpu."
    with pytest.raises(UsageError, match="a package needs a target"):
        unverified(path, Changes(drop_targets=["gpu", "cpu_v3"]))


def test_what_means_nothing_is_refused(tmp_path: Path) -> None:
    package = sample_package(tmp_path)
    with pytest.raises(UsageError, match="nothing to change"):
        unverified(package, Changes())
    with pytest.raises(UsageError, match="there is no folder"):
        repack(package, tmp_path / "none" / "out.pt2", Changes(version="2"))
    sidecar = tmp_path / "model.onnx.exportkit"
    write_package(sidecar, samples.sidecar(), samples.SIDECAR_RECORDS)
    with pytest.raises(UsageError, match="is an ONNX model, which is not a package"):
        unverified(sidecar, Changes(version="2"))
    assert not (tmp_path / "out.pt2").exists()


def test_an_old_signature_is_not_left_beside_the_new_package(tmp_path: Path) -> None:
    package, old, new = sample_package(tmp_path), signer(tmp_path, "old"), signer(tmp_path, "new")
    sign_package(package, old.key)
    with pytest.raises(UsageError, match=r"model\.pt2\.sig is beside model\.pt2 and would not belong"):
        repack(package, package, Changes(version="2"))
    repack(package, package, Changes(version="2"), PackOptions(verify=False, sign_key=new.key))
    from exportkit.package.trust import demand

    with PackageReader(package, demand=demand(new.public)) as reader:
        assert reader.manifest.version == "2"
    with pytest.raises(SignatureMissingError):
        PackageReader(package, demand=demand(old.public))


def test_a_required_signature_is_checked_first(tmp_path: Path) -> None:
    package, key = sample_package(tmp_path), signer(tmp_path)
    with pytest.raises(SignatureMissingError):
        unverified(package, Changes(version="2"), trust=Trust([key.public]))
    assert not (tmp_path / "out.pt2").exists()


# --- libraries --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose library is replaced; not to be changed."""
    path = tmp_path_factory.mktemp("shapes") / "shapes.pt2"
    assemble([artifact("op-shapes")], describe_with_needed(stable_library.build(SOURCE)), path)
    return path


@runs_op_shapes
def test_another_build_takes_the_place_of_a_library_and_is_verified(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = stable_library.build(SOURCE, None, "-O2")
    out = tmp_path / "out.pt2"
    code, text, _ = run(capsys, "package", shapes, "--op-library", build, "-o", out, "--json")
    said = json.loads(text)
    assert code == 0
    assert {check["verdict"]["kind"] for check in said["verification"]["checks"]} == {"match"}
    before, after = digests(shapes), digests(out)
    assert {name for name in before if before[name] != after[name]} == {"exportkit/ops/linux-x86_64/libop_shapes.so"}
    assert before.keys() == after.keys()
    (done,) = said["done"]
    assert done.startswith("replaced exportkit/ops/linux-x86_64/libop_shapes.so: sha256 ")


@runs_op_shapes
def test_a_library_that_computes_something_else_is_not_written(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = SOURCE.read_text().replace("return scaled(x, -1);", "return scaled(x, -1.5);")
    assert wrong != SOURCE.read_text()
    build = stable_library.build(SOURCE, wrong, name="renamed_shapes")
    code, text, _ = run(capsys, "package", shapes, "--op-library", build, "-o", tmp_path / "out.pt2")
    assert code == 1
    assert "was not written" in text
    assert "a given library defines its operators" in text
    assert "minus: " in text
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".pt2"] == []


def test_a_library_that_lacks_an_operator_or_has_another_schema_is_refused(tmp_path: Path) -> None:
    build = stable_library.build(SOURCE)
    with PackageReader(artifact("op-shapes")) as reader:
        called = {operator.name: operator for operator in reader.manifest.operators}
    absent = m.Operator(name="op_shapes::absent", schema="op_shapes::absent(Tensor x) -> Tensor")
    halves = m.Operator(name="op_shapes::halves", schema="op_shapes::halves(Tensor input) -> Tensor[]")
    for operator, error in ((absent, MissingLibraryError), (halves, SchemaChangedError)):
        operators = tuple(sorted((called | {operator.name: operator}).values(), key=lambda each: each.name))
        package = rewritten(artifact("op-shapes"), tmp_path / "asking.pt2", operators=operators)
        with pytest.raises(error, match=operator.name):
            unverified(package, Changes(op_libraries=[build]))
    assert not (tmp_path / "out.pt2").exists()


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    state = {name: tensor.detach().contiguous() for name, tensor in Weighted(1).state_dict().items()}
    del state["tied"]
    save_file(state, tmp_path / "tuned.safetensors")
    return tmp_path / "tuned.safetensors"


def test_other_weights_get_cases_of_their_own_with_the_same_inputs(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, out = artifact("weighted"), tmp_path / "out.pt2"
    code, text, _ = run(
        capsys, "package", old, "--weights", tuned, "--model", MODEL, "-o", out, "--device", "cpu", "--json"
    )
    said = json.loads(text)
    assert code == 0, text
    assert {(check["against"], check["verdict"]["kind"]) for check in said["verification"]["checks"]} == {
        ("cases", "match")
    }
    assert said["done"][-1] == f"recorded 4 cases again, with the eager model {MODEL}"
    before, after = digests(old), digests(out)
    same = [name for name in before if not name.startswith(("data/weights/", "exportkit/cases/"))]
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    with PackageReader(old) as one, PackageReader(out) as other:
        assert other.manifest.source.state_sha256 == state_sha256(Weighted(1))
        for case, again in zip(one.manifest.cases, other.manifest.cases):
            assert (case.record, case.calls[0].sizes) == (again.record, again.calls[0].sizes)
            tensors, recorded = load(one.read(case.record)), load(other.read(again.record))
            assert torch.equal(tensors["0.input.0"], recorded["0.input.0"])
            with torch.no_grad():
                answer = Weighted(1).eval()(recorded["0.input.0"])
            # Another process recorded it. Eager's last bits follow the number of threads, which differs between them.
            torch.testing.assert_close(recorded["0.output.0"], answer)
            assert not torch.allclose(recorded["0.output.0"], tensors["0.output.0"]), "the old weights' answer"
            assert again.calls[0].accuracy.keys() == case.calls[0].accuracy.keys()


def test_what_was_never_packaged_gets_no_other_weights(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run(capsys, "package", artifact("patches"), "--weights", tuned, "-o", tmp_path / "out.pt2")
    assert code == 2
    assert "is no package: it has no library for arr_coc::" in said
    assert "Package it first" in said
    code, _, said = run(capsys, "package", *[artifact("weighted")] * 2, "--weights", tuned, "-o", tmp_path / "out.pt2")
    assert (code, "change one package" in said) == (2, True)
    assert not (tmp_path / "out.pt2").exists()


@pytest.fixture
def anonymous(tmp_path: Path) -> Path:
    """A package whose model cannot be imported."""
    with PackageReader(artifact("weighted")) as reader:
        source = msgspec.structs.replace(reader.manifest.source, model=None)
    return rewritten(artifact("weighted"), tmp_path / "anonymous.pt2", source=source)


def test_weights_are_refused_if_nothing_can_record_the_cases(anonymous: Path, tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the recorded answers belong to the old weights") as refused:
        unverified(anonymous, Changes(weights=tuned))
    assert "--model" in str(refused.value.hint)
    assert not (tmp_path / "out.pt2").exists()


def test_the_packages_program_records_the_cases_if_no_model_can_be_imported(
    anonymous: Path, tuned: Path, tmp_path: Path
) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Weighted(0).eval(), (torch.randn(3, 16),), dynamic_shapes={"x": {0: batch}})
    torch.export.save(program, tmp_path / "program.pt2")
    record = "exportkit/program.pt2"
    described = m.Program(
        records={"forward": "exportkit/program.pt2"}, device="cpu", built_with_torch=str(torch.__version__)
    )
    content = (tmp_path / "program.pt2").read_bytes()
    path = rewritten(anonymous, tmp_path / "with_program.pt2", records={record: content}, program=described)
    changed = unverified(path, Changes(weights=tuned))
    assert changed.done == (
        "replaced the weights with tuned.safetensors",
        "left out the ExportedProgram: it has the old weights",
        "recorded 4 cases again, with the package's ExportedProgram",
    )
    with PackageReader(tmp_path / "out.pt2") as reader:
        assert reader.manifest.program is None
        for case in reader.manifest.cases:
            tensors = load(reader.read(case.record))
            with torch.no_grad():
                torch.testing.assert_close(tensors["0.output.0"], Weighted(1).eval()(tensors["0.input.0"]))


def test_weights_that_do_not_fit_are_refused(tuned: Path, tmp_path: Path) -> None:
    save_file({"few": torch.zeros(3)}, tuned)
    with pytest.raises(WeightsError, match="missing: mix or tied"):
        repack(artifact("weighted"), tmp_path / "out.pt2", Changes(weights=tuned))
    with pytest.raises(WeightsError, match="no weights outside its compiled code"):
        repack(artifact("triton-cpu"), tmp_path / "out.pt2", Changes(weights=tuned))
    assert not (tmp_path / "out.pt2").exists()
