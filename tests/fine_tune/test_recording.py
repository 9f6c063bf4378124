"""Another fine-tune's weights in a package: the same compiled code, other cases, verified before it is written."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load, save_file

import exportkit
from exportkit.errors import UsageError, WeightsError
from exportkit.export.record.cases import state_sha256
from exportkit.fine_tune.new_weights import replace_weights
from exportkit.package.archive import STOCK_RECORDS, Content, PackageReader, StoredRecord, write_package
from exportkit.package.manifest import Manifest
from exportkit.package.signing import sign_package
from exportkit.package.trust import demand
from exportkit.packaging import PackOptions, build_package
from exportkit.reference_model import ReferenceModel
from exportkit.spec import FORWARD
from exportkit.verify.options import VerifyOptions
from tests.artifacts import artifact
from tests.commands import run
from tests.export.weights_models import Weighted
from tests.package.signers import package as sample_package
from tests.package.signers import signer
from tests.runtime.fine_tunes import X, save, state
from tests.verify.state_models import Decoder


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXPORTKIT_CACHE", str(tmp_path / "exportkit-cache"))


def with_weights(package: Path, weights: Path, out: Path) -> Manifest:
    """Writes a package with other weights and without cases."""
    with PackageReader(package) as reader:
        records: dict[str, Content] = {n: StoredRecord(reader, n) for n in reader.names if n not in STOCK_RECORDS}
        return write_package(out, replace_weights(reader, reader.manifest, records, weights), records)


def test_it_answers_as_the_model_with_those_weights(tuned: Path, tmp_path: Path) -> None:
    with_weights(artifact("weighted"), tuned, tmp_path / "tuned.pt2")
    with exportkit.load(tmp_path / "tuned.pt2", device="cpu") as model, torch.no_grad():
        torch.testing.assert_close(model(X), Weighted(1).eval()(X))
        answer = model(X)
        model.swap_weights(Weighted(0).state_dict())
        torch.testing.assert_close(model(X), Weighted(0).eval()(X))
    with exportkit.load(artifact("weighted"), device="cpu") as model:
        model.swap_weights(tuned)
        assert torch.equal(model(X), answer)


def test_a_weight_that_is_built_into_some_target_can_be_given_with_its_value_only(tuned: Path, tmp_path: Path) -> None:
    with PackageReader(artifact("weighted")) as reader:
        first, second = reader.manifest.targets
        outside = {constant: name for constant, name in second.constants[FORWARD].items() if name != "few"}
        targets = (first, msgspec.structs.replace(second, constants={FORWARD: outside}))
        records = {name: StoredRecord(reader, name) for name in reader.names if name not in STOCK_RECORDS}
        write_package(tmp_path / "x.pt2", msgspec.structs.replace(reader.manifest, targets=targets), records)
    with pytest.raises(WeightsError, match="few differs from the package's, which is built into the code of target"):
        with_weights(tmp_path / "x.pt2", tuned, tmp_path / "tuned.pt2")
    save(tuned, {**state(1), "few": Weighted(0).few.detach()})
    with_weights(tmp_path / "x.pt2", tuned, tmp_path / "tuned.pt2")


# --- its cases are recorded again ------------------------------------------------------------------------------------


MODEL = "tests/export/weights_models.py:weighted"


def digests(path: Path) -> dict[str, str]:
    with PackageReader(path) as reader:
        reader.verify()
        return {record.name: record.sha256 for record in reader.manifest.records}


def tensors(path: Path) -> list[dict[str, torch.Tensor]]:
    with PackageReader(path) as reader:
        return [load(reader.read(case.record)) for case in reader.manifest.cases]


def test_other_weights_get_cases_of_their_own_with_the_same_inputs(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, out = artifact("weighted"), tmp_path / "out.pt2"
    given = ("--weights", tuned, "--model", MODEL, "-o", out, "--device", "cpu", "--json")
    code, text, err = run(capsys, "package", old, *given)
    checks = json.loads(text)["verification"]["checks"]
    assert code == 0, text
    assert {(check["against"], check["verdict"]["kind"]) for check in checks} == {("cases", "match")}
    assert f"recording the cases again, with {MODEL}" in err
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


def test_weights_are_refused_if_nothing_can_record_the_cases_or_they_do_not_fit(tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt2"
    with pytest.raises(UsageError, match="the recorded answers belong to the old weights") as refused:
        build_package([artifact("weighted")], out, weights=tuned)
    assert "--model" in str(refused.value.hint)
    with pytest.raises(WeightsError, match="no weights outside its compiled code"):
        build_package([artifact("triton-cpu")], out, weights=tuned)
    save_file({"few": torch.zeros(3)}, tuned)
    with pytest.raises(WeightsError, match="missing: mix or tied"):
        build_package([artifact("weighted")], out, weights=tuned)
    assert not out.exists()


def test_sequences_are_recorded_again_and_the_state_begins_as_packaged(tmp_path: Path) -> None:
    """The weights may come with what sessions begin with, and with no other state."""
    torch.manual_seed(7)
    whole = {name: tensor.clone() for name, tensor in Decoder().state_dict().items()}
    save_file(whole, tmp_path / "whole.safetensors")
    save_file({**whole, "position": whole["position"] + 3}, tmp_path / "used.safetensors")
    old, out = artifact("decoder"), tmp_path / "out.pt2"
    options = PackOptions(
        VerifyOptions(against="cases", device="cpu", eager=ReferenceModel("tests/verify/state_models.py:decoder"))
    )
    with pytest.raises(WeightsError, match="state that sessions do not begin with: position\n"):
        build_package([old], out, options, weights=tmp_path / "used.safetensors")
    _, report = build_package([old], out, options, weights=tmp_path / "whole.safetensors")
    assert report is not None
    assert (report.exit_code, {check.against for check in report.checks}) == (0, {"cases", "sessions"})
    for before, after in zip(tensors(old), tensors(out), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before if ".input." in name)
        assert not torch.equal(before["0.output.0"], after["0.output.0"])
        if "state.5" in before:
            assert torch.equal(before["state.5"], after["state.5"])  # the position


# --- a package takes the place of another -----------------------------------------------------------------------------


def test_a_package_may_take_its_own_place_and_all_but_what_is_replaced_stays(tmp_path: Path) -> None:
    package = sample_package(tmp_path)
    with PackageReader(package) as reader:
        before = reader.manifest
    build_package([package], package, PackOptions(verify=False), version="2")
    with PackageReader(package) as reader:
        reader.verify()
        assert reader.manifest == msgspec.structs.replace(before, version="2")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "model"))] == ["model.pt2"]


def test_an_old_signature_is_not_left_beside_the_new_package(tmp_path: Path) -> None:
    package, old, new = sample_package(tmp_path), signer(tmp_path, "old"), signer(tmp_path, "new")
    sign_package(package, old.key)
    with pytest.raises(UsageError, match=r"model\.pt2\.sig is beside model\.pt2 and would not belong"):
        build_package([package], package, PackOptions(verify=False), version="2")
    build_package([package], package, PackOptions(verify=False, sign_key=new.key), version="2")
    with PackageReader(package, demand=demand(new.public)) as reader:
        assert reader.manifest.version == "2"
