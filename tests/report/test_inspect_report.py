"""`exportkit inspect --report` writes a page, or says what was wrong and leaves the file as it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exportkit.cli import main
from exportkit.package.archive import PackageReader
from exportkit.report.argument_text import argument_text
from exportkit.report.package_data import Words
from exportkit.report.report_page import report_data
from exportkit.report.untrusted import PageLimits
from tests.artifacts import artifact
from tests.report.written import call, document, node, package, program


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def data_of(page: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def verification(path: Path) -> Path:
    outputs = [{"name": "y", "compared": 4, "mismatched": 0, "max_abs": "inf", "error": None, "note": None}]
    verdict = {"kind": "match", "message": "fine", "exit_code": 0, "outputs": outputs}
    check = {"against": "cases", "label": "case 0", "verdict": verdict, "seconds": 0.1, "target": "cpu"}
    file = path.with_suffix(".verification.json")
    with PackageReader(path) as reader:
        document = {"artifact": "a.pt2", "manifest_sha256": reader.manifest_sha256, "exit_code": 0, "checks": [check]}
    file.write_text(json.dumps(document | {"targets": [], "more": 1}))
    return file


def test_the_page_has_what_the_files_say(capsys, tmp_path: Path):
    artifact = package(tmp_path / "a.pt2")
    page = tmp_path / "a.html"
    page.write_text("an older page")
    code, out, _ = inspect(capsys, artifact, "--report", page, "--verification", verification(artifact))
    assert code == 0
    assert out.startswith(f"{page}: ")
    data = data_of(page)
    assert data["verification"]["checks"][0]["verdict"]["outputs"][0]["max_abs"] == "inf"
    assert data["methods"][0]["inputs"] == [["x", "float32[4]"]]
    assert data["cases"][0][:1] == ["the exported sizes"]
    assert data["left_out"] == []


def test_with_json_the_page_is_written_too(capsys, tmp_path: Path):
    code, out, _ = inspect(capsys, package(tmp_path / "a.pt2"), "--report", tmp_path / "a.html", "--json")
    assert code == 0
    assert json.loads(out)["manifest"]["name"] == "written"
    assert data_of(tmp_path / "a.html")["name"] == "written"


def test_the_same_artifact_gives_the_same_page(capsys, tmp_path: Path):
    artifact = package(tmp_path / "a.pt2")
    pages = [tmp_path / name for name in ("1.html", "2.html")]
    for page in pages:
        inspect(capsys, artifact, "--report", page)
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_only_the_script_of_the_page_may_run_and_nothing_may_be_fetched(capsys, tmp_path: Path):
    inspect(capsys, package(tmp_path / "a.pt2"), "--report", tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    directives = dict(each.split(" ", 1) for each in policy.split("; "))
    assert directives["default-src"] == directives["base-uri"] == directives["form-action"] == "'none'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]+'", directives[name])
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verification", "VERIFICATION"], "--verification is for a report: name the page with --report FILE.html"),
        (["--report", "a.txt"], "give a file that ends in .html"),
        (["--report", "missing/a.html"], "there is no folder"),
        (["--report", "a.html", "--verification", "NO VERIFICATION"], "is not a verification"),
        (["--report", "a.html", "--verification", "OTHER VERIFICATION"], "is a verification of another artifact"),
    ],
)
def test_what_does_not_fit_is_refused_and_no_page_is_written(
    options: list[str], message: str, capsys, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    artifact = package(tmp_path / "a.pt2")
    other = package(tmp_path / "other.pt2", program(document([node("z", "x")], ["z"])), call=call(("z",)))
    (tmp_path / "no.json").write_text("{}")
    files = {
        "VERIFICATION": verification(artifact),
        "NO VERIFICATION": tmp_path / "no.json",
        "OTHER VERIFICATION": verification(other),
    }
    (tmp_path / "a.html").write_text("an older page")
    code, _, err = inspect(capsys, artifact, *[files.get(option, option) for option in options])
    assert code == 2, err
    assert message in err
    assert (tmp_path / "a.html").read_text() == "an older page"


def test_a_page_does_not_replace_what_it_is_made_from(capsys, tmp_path: Path):
    artifact = package(tmp_path / "a.html")
    before = artifact.read_bytes()
    (tmp_path / "link.html").symlink_to(artifact)
    for page in (artifact, tmp_path / "link.html"):
        code, _, err = inspect(capsys, artifact, "--report", page)
        assert code == 2
        assert "would replace a file that it is made from" in err
    assert artifact.read_bytes() == before


def test_what_is_too_much_is_left_out_with_a_note(tmp_path: Path):
    words = Words("", "", (), (), (), (), (), None, ())
    with PackageReader(package(tmp_path / "a.pt2")) as reader:
        data = report_data(reader, words, None, PageLimits(rows=1))
    assert any(note.endswith("records, which are smaller than those listed") for note in data["left_out"])
    assert sum(size for _, size, *_ in data["records"]) == data["file"]["size"]
    assert data["records"][1][0].endswith("smaller records")


def test_a_report_does_not_import_torch(tmp_path: Path):
    artifact = package(tmp_path / "a.pt2")
    code = (
        "import sys; from exportkit.cli import main; "
        f"code = main(['inspect', {str(artifact)!r}, '--report', {str(tmp_path / 'a.html')!r}]); "
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_the_operators_that_compiled_code_calls_are_listed_in_order(capsys, tmp_path: Path):
    code, _, err = inspect(capsys, artifact("patches"), "--report", tmp_path / "a.html")
    assert code == 0, err
    with PackageReader(artifact("patches")) as reader:
        names = {operator.name for operator in reader.manifest.operators}
        targets = {target.name for target in reader.manifest.targets}
    calls = data_of(tmp_path / "a.html")["compiled_calls"]
    assert {operator.removesuffix(".default") for _, operator, _ in calls} == names
    assert {target for target, _, _ in calls} == targets
    assert all("=" in arguments for _, _, arguments in calls)


@pytest.mark.parametrize(
    "argument",
    [
        ({"as_scalar_type": 7}, "float32"),
        ({"as_device": {"type": "cuda", "index": 1}}, "cuda:1"),
        ({"as_none": True}, "None"),
        ({"as_ints": list(range(20))}, "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ...]"),
        ({"as_optional_tensors": [{"as_tensor": {"name": "a"}}, {"as_none": True}]}, "[a, None]"),
        ({"as_sym_ints": [{"as_int": 1}, {"as_name": "s"}]}, "[1, s]"),
        ({"as_string": "</script>"}, "'</script>'"),
        ({"as_graph": {"name": "g", "graph": 3}}, "a graph"),
    ],
)
def test_arguments_are_short_texts(argument: tuple[dict, str]):
    assert argument_text(argument[0]) == argument[1]


def test_an_argument_that_is_nested_deeply_is_cut():
    deep: dict = {"as_int": 1}
    for _ in range(5000):
        deep = {"as_string_to_argument": {"key": deep}}
    assert argument_text(deep) == "..."
