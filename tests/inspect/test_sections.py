"""What `exportkit inspect` says of methods, state and sequences, and the page that it and `verify` write."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from exportkit.cli.error_plot import error_plot
from exportkit.inspect.sections import Section, sections
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from tests.artifacts import artifact
from tests.commands import run
from tests.package import samples, stateful_samples

HOSTILE = "</td><script>owned</script><img src=x onerror=owned>\u202e\x1b&lt;'\""


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    write_package(tmp_path / "sample.pt2", samples.manifest(), samples.RECORDS)
    return tmp_path / "sample.pt2"


@pytest.fixture
def stateful(tmp_path: Path) -> Path:
    write_package(tmp_path / "stateful.pt2", stateful_samples.manifest(), stateful_samples.RECORDS)
    return tmp_path / "stateful.pt2"


class Page(HTMLParser):
    """The elements of a page, and the texts of its tables."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.texts: list[str] = []
        self.policy = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        given = dict(attributes)
        assert not any(name.startswith("on") or name in ("src", "href", "style") for name in given)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_target_needs_the_torch_that_its_library_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = samples.manifest()
    library = msgspec.structs.replace(manifest.libraries[0], torch_bound="2.13")
    write_package(tmp_path / "x.pt2", msgspec.structs.replace(manifest, libraries=(library,)), samples.RECORDS)
    _, said, _ = run(capsys, "inspect", tmp_path / "x.pt2")
    assert "torch 2.13 only, as libtoy_cpu.so (built with" in said


def test_methods_state_and_sequences_are_described(stateful: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run(capsys, "inspect", stateful)
    assert code == 0
    assert "Method decode takes" in said
    assert "Method forward returns" in said
    assert re.search(r"written\.scratch +float16\[batch, 3\] +as accurate as eager", said)
    keys = r"cache\.keys +float32\[batch, 4\] +16 bytes for each batch +written by decode +begins with stored values"
    assert re.search(keys, said)
    assert re.search(r"step +int64\[\] +8 bytes +written by decode +begins as zeros", said)
    assert re.search(r"case 1 +decode, forward, decode; batch=2", said)


def test_the_size_of_a_target_is_that_of_all_methods(stateful: Path) -> None:
    with PackageReader(stateful) as reader:
        (targets,) = (section for section in sections(reader) if section.title == "Targets")
    code = [data for name, data in stateful_samples.RECORDS.items() if name.startswith("data/aotinductor/")]
    assert len(code) > 1
    assert targets.rows[0][-1] == f"{sum(map(len, code))} bytes"


def test_the_page_has_what_is_printed_and_the_errors_weights_and_records(
    stateful: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.html"
    page.write_text("an older page")
    code, out, _ = run(capsys, "inspect", stateful, "--report", page)
    assert (code, out.startswith(f"{page}: ")) == (0, True)
    first = page.read_bytes()
    texts = Page(page).texts
    with PackageReader(stateful) as reader:
        printed = [text for section in sections(reader) for row in (section.title, *section.rows) for text in row]
        assert {record.sha256 for record in reader.manifest.records} <= set(texts)
    assert {text for text in printed if len(text) > 1} <= set(texts)
    assert "greatest 1e-07" in texts
    run(capsys, "inspect", stateful, "--report", page, "--json")
    assert page.read_bytes() == first


def test_nothing_that_an_artifact_says_is_more_than_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = m.Source(model=HOSTILE, model_kwargs={HOSTILE: HOSTILE}, dtype=None, seed=0, state_sha256="0" * 64)
    write_package(tmp_path / "a.pt2", samples.manifest(version=HOSTILE, source=source), samples.RECORDS)
    assert run(capsys, "inspect", tmp_path / "a.pt2", "--report", tmp_path / "a.html")[0] == 0
    page = Page(tmp_path / "a.html")
    drawn = {"figure", "figcaption", "svg", "line", "circle", "text"}
    assert page.elements - drawn == {"html", "head", "meta", "title", "style", "body", "h1", "h2", "table", "tr", "td"}
    assert not set("\u202e\x1b") & set("".join(page.texts))
    assert any("<script>owned" in text for text in page.texts)
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[\w+/=]+'; base-uri 'none'; form-action 'none'", page.policy
    )


def test_errors_are_drawn_on_a_logarithmic_axis_for_each_output() -> None:
    drawn = error_plot({HOSTILE: {"eager": [1e-7], "package": [1e-6], "allowed": [1e-5]}, "exact": {"eager": [0.0]}})
    assert not re.search("<(script|img)", drawn)
    places = [float(x) for x in re.findall(r'class="(?:eager|package)" cx="([\d.]+)"', drawn)]
    bar = float(re.findall(r'class="allowed" x1="([\d.]+)"', drawn)[0])
    exact, eager, package = sorted(places)
    assert package - eager == pytest.approx(bar - package, abs=0.2)  # ten times each
    assert eager - exact == pytest.approx(2 * (package - eager), abs=0.2)  # an error of 0 is drawn at 1e-9
    assert error_plot({"labels": {}}) == ""


def test_much_is_shortened_with_a_note(sample: Path, tmp_path: Path) -> None:
    from exportkit.cli.page import write_page

    with PackageReader(sample) as reader:
        write_page(tmp_path / "a.html", reader, [Section("More", [("x" * 10**6,)] * 1003)])
    texts = Page(tmp_path / "a.html").texts
    assert "and 3 more" in texts
    assert "x" * 1000 + "... (1,000,000 characters)" in texts


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("a.txt", "give a file that ends in .html"),
        ("missing/a.html", "there is no folder"),
        ("link.html", "it would replace what is read"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_first(
    page: str, message: str, sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link.html").symlink_to(sample)
    before = sample.read_bytes()
    for command in ("inspect", "verify"):
        code, _, err = run(capsys, command, sample, "--report", tmp_path / page)
        assert code == 2
        assert message in err
    assert sample.read_bytes() == before


def test_verify_writes_the_page_with_its_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "a.html"
    code, out, _ = run(capsys, "verify", artifact("patches-program"), "--against", "cases", "--report", page)
    assert (code, "program on cpu" in out) == (0, True)
    texts = Page(page).texts
    assert any("eager (circles), the greatest error allowed (bars)" in text for text in texts)
    assert "Verification" in texts
    assert any("outputs agree" in text for text in texts)


def test_neither_text_nor_page_imports_torch(sample: Path, tmp_path: Path) -> None:
    code = "import sys; from exportkit.cli import main; "
    code += f"main(['inspect', {str(sample)!r}]); main(['inspect', {str(sample)!r}, '--report', 'a.html']); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "False"
