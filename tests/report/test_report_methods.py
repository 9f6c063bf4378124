"""The report of a model with several methods and state: each method's call and graph, the state, the sequences."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from exportkit.cli import main
from exportkit.package.archive import PackageReader, write_package
from exportkit.report.untrusted import LeftOut
from exportkit.report.verification import read_verification
from tests.package import stateful_samples as samples
from tests.report.test_inspect_report import data_of


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    write_package(tmp_path / "sample.pt2", samples.manifest(), samples.RECORDS)
    return tmp_path / "sample.pt2"


def report_of(path: Path, page: Path, *options: Any) -> dict[str, Any]:
    assert main(["inspect", str(path), "--report", str(page), *map(str, options)]) == 0
    return data_of(page)


def test_inspect_shows_methods_state_and_sequences(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(sample)]) == 0
    said = capsys.readouterr().out
    assert "Method decode takes" in said
    assert "Method forward returns" in said
    assert re.search(r"written\.scratch +float16\[batch, 3\] +as accurate as eager", said)
    keys = r"cache\.keys +float32\[batch, 4\] +16 bytes for each batch +written by decode +begins with stored values"
    assert re.search(keys, said)
    assert re.search(r"step +int64\[\] +8 bytes +written by decode +begins as zeros", said)
    assert re.search(r"case 1 +decode, forward, decode; batch=2", said)
    assert main(["inspect", str(sample), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert [method["name"] for method in manifest["methods"]] == ["forward", "decode"]
    assert [state["name"] for state in manifest["state"]] == ["cache.keys", "step"]
    assert [call["method"] for call in manifest["cases"][1]["calls"]] == ["decode", "forward", "decode"]


def test_the_size_of_a_target_is_that_of_all_methods(sample: Path, tmp_path: Path) -> None:
    data = report_of(sample, tmp_path / "page.html")
    code = sum(len(content) for name, content in samples.RECORDS.items() if name.startswith("data/aotinductor/"))
    assert data["targets"][0][-1] == code


def test_the_sizes_say_whose_code_a_record_is(sample: Path, tmp_path: Path) -> None:
    records = {name: whose for name, _, _, _, _, whose in report_of(sample, tmp_path / "page.html")["records"]}
    assert records[samples.CODE] == "decode"
    assert {name: whose for name, whose in records.items() if whose == "forward"}
    assert all(whose is None for name, whose in records.items() if not name.startswith("data/aotinductor/"))


def test_results_are_summarized_by_method_and_the_state_by_itself(sample: Path, tmp_path: Path) -> None:
    data = report_of(sample, tmp_path / "page.html")
    named = {(each["method"], each["name"]): each for each in data["numbers"]}
    assert set(named) == {
        ("forward", "scores"), ("decode", "0"), ("decode", "written.scratch"), (None, "cache.keys"), (None, "step")
    }  # fmt: skip
    assert named["decode", "0"]["values"]["count"] == 2 * 8  # of both calls
    assert named["decode", "0"]["errors"]["exact"] == 2 * 8
    assert named[None, "cache.keys"]["errors"]["greatest"] == 1e-7
    assert "errors" not in named[None, "step"]
    assert [row[0] for row in data["cases"]] == ["batch=2", "decode, forward, decode; batch=2"]


def test_errors_of_compiled_code_are_those_of_the_method_that_was_called(sample: Path, tmp_path: Path) -> None:
    def output(name: str, call: int | None) -> dict[str, Any]:
        return {"name": name, "compared": 1, "mismatched": 0, "call": call}

    found = [output("call 0: 0", 0), output("call 1: scores", 1), output("state step", None)]
    verdict = {"kind": "match", "message": "ok", "exit_code": 0, "outputs": found}
    check = {"against": "cases", "label": "case 1 (decode, forward, decode)", "verdict": verdict}
    with PackageReader(sample) as reader:
        document = {"artifact": "a", "manifest_sha256": reader.manifest_sha256, "exit_code": 0, "checks": [check]}
        (tmp_path / "v.json").write_text(json.dumps(document))
        read = read_verification(tmp_path / "v.json", reader, LeftOut())
    shown = [each["name"] for each in read["checks"][0]["verdict"]["outputs"]]
    assert shown == ["decode: 0", "forward: scores", "state step"]
