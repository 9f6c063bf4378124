"""A wrong answer of any target is found, not only one of the target that would be loaded here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from exportkit.package.archive import PackageReader, write_package
from exportkit.package.manifest import Target
from exportkit.spec import FORWARD
from tests.artifacts import ROOT, artifact
from tests.commands import run

# Of the same shape, and added at different places: exchanged, they give another answer.
EXCHANGED = {"norm.bias": "norm.running_mean", "norm.running_mean": "norm.bias"}
MODEL = "tests/export/weights_models.py:weighted"


def rebuilt(path: Path, change: Callable[[Target], Target]) -> Path:
    """The package of two targets, both of which run where x86-64-v3 does, each changed.

    They are called as on a machine with x86-64-v4, which takes the second.
    """
    with PackageReader(artifact("weighted")) as reader:
        manifest = reader.manifest
        v3, v4 = manifest.targets
        records = {name: reader.read(name) for name in reader.names if f"/{v4.name}/" not in name}
    records |= {name.replace(v3.name, v4.name): data for name, data in records.items() if f"/{v3.name}/" in name}
    older = msgspec.structs.replace(v3, cpu_isa="x86-64-v2")
    newer = msgspec.structs.replace(v3, name=v4.name)
    write_package(path, msgspec.structs.replace(manifest, targets=(change(older), change(newer))), records)
    return path


def broken(target: Target) -> Target:
    if "v3" not in target.name:
        return target
    return msgspec.structs.replace(target, constants={FORWARD: {**target.constants[FORWARD], **EXCHANGED}})


@pytest.fixture(scope="module")
def one_broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rebuilt(tmp_path_factory.mktemp("targets") / "one.pt2", broken)


def test_a_wrong_value_of_a_target_that_is_not_the_best_one_is_found(
    one_broken: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where the model's source is found
    code, out, err = run(capsys, "verify", one_broken, "--model", MODEL, "--shapes", 2, "--json")
    assert code == 1, err
    report = json.loads(out)
    assert [target["name"] for target in report["targets"]] == ["cpu_x86_64_v4", "cpu_x86_64_v3"]
    assert all(target["load_seconds"] > 0 and target["left_out"] is None for target in report["targets"])
    kinds: dict[str, set[tuple[str, str]]] = {"cpu_x86_64_v4": set(), "cpu_x86_64_v3": set()}
    for check in report["checks"]:
        kinds[check["target"]].add((check["against"], check["verdict"]["kind"]))
    assert kinds == {
        "cpu_x86_64_v4": {("cases", "match"), ("eager", "match")},
        "cpu_x86_64_v3": {("cases", "mismatch"), ("eager", "mismatch")},
    }


def test_what_is_printed_says_of_which_target_it_is(one_broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "verify", one_broken, "--against", "cases")
    assert code == 1, err
    good, bad = out.split("\n  cpu_x86_64_v3 on cpu, loaded in ")
    assert "cpu_x86_64_v4 on cpu, loaded in " in good
    assert "FAIL" not in good
    assert "ok" not in bad.partition("cases, case 0")[0].split()
    assert "case 0 (batch=3) of cpu_x86_64_v3:" in bad
