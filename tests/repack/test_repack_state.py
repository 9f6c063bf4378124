"""Programs of several methods with state are repacked: targets, weights, and cases that are recorded again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load, save_file

from exportkit.cli import main
from exportkit.errors import WeightsError
from exportkit.package.archive import STOCK_RECORDS, PackageReader, write_package
from exportkit.packaging import PackOptions
from exportkit.repack.repacking import Changes, repack
from tests.artifacts import artifact
from tests.verify.state_models import Decoder

MODEL = "tests/verify/state_models.py:decoder"
STATE = ("keys_", "values_", "bias", "position")


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    """Other weights, without the state."""
    torch.manual_seed(7)
    weights = {name: t.clone() for name, t in Decoder().state_dict().items() if not name.startswith(STATE)}
    save_file(weights, tmp_path / "tuned.safetensors")
    return tmp_path / "tuned.safetensors"


def answers(path: Path) -> list[dict[str, torch.Tensor]]:
    with PackageReader(path) as reader:
        reader.verify()
        return [load(reader.read(case.record)) for case in reader.manifest.cases]


@pytest.mark.process
def test_other_weights_get_sequences_of_their_own_with_the_same_inputs(tuned, tmp_path, capsys) -> None:
    old, out = artifact("decoder"), tmp_path / "out.pt2"
    options = ["--weights", str(tuned), "--model", MODEL, "-o", str(out), "--device", "cpu", "--json"]
    code = main(["package", str(old), *options])
    said = json.loads(capsys.readouterr().out)
    assert code == 0, said
    checks = said["verification"]["checks"]
    assert {check["against"] for check in checks} == {"cases", "sessions"}
    assert said["done"][-1] == f"recorded 8 cases again, with the eager model {MODEL}"
    for before, after in zip(answers(old), answers(out)):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before if ".input." in name)
        assert not torch.equal(before["0.output.0"], after["0.output.0"])
        if "state.5" in before:
            assert torch.equal(before["state.5"], after["state.5"])  # the position


@pytest.mark.process
def test_the_packages_programs_record_the_sequences_and_the_state_begins_as_packaged(tuned, tmp_path) -> None:
    """The weights may come with what sessions begin with, and with no other state."""
    both = tmp_path / "both.pt2"
    with PackageReader(artifact("decoder")) as code, PackageReader(artifact("decoder-program")) as program:
        records = {name: code.read(name) for name in code.names if name not in STOCK_RECORDS}
        assert program.manifest.program is not None
        records |= {name: program.read(name) for name in program.manifest.program.records.values()}
        source = msgspec.structs.replace(code.manifest.source, model=None)
        changes = {"program": program.manifest.program, "source": source}
        write_package(both, msgspec.structs.replace(code.manifest, **changes), records)
    torch.manual_seed(7)
    whole = {name: tensor.clone() for name, tensor in Decoder().state_dict().items()}
    save_file(whole, tmp_path / "whole.safetensors")
    save_file({**whole, "position": whole["position"] + 3}, tmp_path / "used.safetensors")
    options = PackOptions(verify=False)
    with pytest.raises(WeightsError, match="state that sessions do not begin with: position\n"):
        repack(both, tmp_path / "a.pt2", Changes(weights=tmp_path / "used.safetensors"), options)
    assert not (tmp_path / "a.pt2").exists()
    done = repack(both, tmp_path / "a.pt2", Changes(weights=tmp_path / "whole.safetensors"), options).done
    assert done[-1] == "recorded 8 cases again, with the package's ExportedPrograms"
    repack(both, tmp_path / "b.pt2", Changes(weights=tuned), options)
    for one, other in zip(answers(tmp_path / "a.pt2"), answers(tmp_path / "b.pt2")):
        assert all(torch.equal(one[name], other[name]) for name in one)
