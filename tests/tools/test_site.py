"""The site and the man page come from the documents, without a warning and without a network."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.subprocesses import output_of
from tools import site
from tools.generated import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    site.gather(folder)
    return folder


class Loaded(HTMLParser):
    """Collects what a browser loads by itself when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.found.append(given.get("src") or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.found.append(given.get("href") or "")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(source: Path, tmp_path: Path):
    site.build(source, tmp_path, "html")
    for path in tmp_path.rglob("*.html"):
        page = Loaded()
        page.feed(path.read_text())
        assert not [url for url in page.found if url.startswith(("http:", "https:", "//"))], path.name
    text = (tmp_path / "api.html").read_text()
    assert "exportkit.load" in text
    assert "swap_weights" in text


def test_the_front_page_has_a_picture_five_commands_and_three_figures_from_results(source: Path):
    page = (source / "index.md").read_text()
    assert (source / "what-it-does.svg").exists()
    assert ":file: what-it-does.svg" in page
    assert len(re.findall(r"^\$ exportkit ", page, re.MULTILINE)) == 5
    figures = re.findall(r"^:::\{container\} card\n([\d.]+ \S+)\n", page, re.MULTILINE)
    assert [figure.split()[1] for figure in figures] == ["ms", "ms", "images/s"]


def words(page: str) -> str:
    """What a manual page says, without the requests to its formatter, which differ between versions of Sphinx."""
    return " ".join(line for line in page.splitlines() if not line.startswith((".", "'")))


def test_the_man_page_is_that_of_the_commands(source: Path):
    page = words(site.man_page(source))
    assert words(site.MAN_PAGE.read_text()) == page, "docs/exportkit.1 is stale: run `make docs`"
    # For browsers, Sphinx makes a dash of an option's two hyphens. It keeps pages from one form for the next.
    assert "\N{EN DASH}" not in page


def test_a_link_leads_to_the_page_of_the_site_to_the_host_or_nowhere():
    places = site.pages()

    def linked(text: str, source: str = "docs/serving.md") -> str:
        return site.with_links_of_the_site(text, source, places)

    assert linked("[a](own-models.md#sizes)") == "[a](own-models.md#sizes)"
    assert linked("[a](../CONTRIBUTING.md)") == "[a](contributing.md)"
    assert linked("[a](docs/cpp.md)", "README.md") == "[a](cpp.md)"
    assert linked("[a](../cpp.md)", "docs/adr/0001-stable-abi.md") == "[a](../cpp.md)"
    assert linked("[a](../setup.py)").startswith("[a](https://github.com/exportkit/exportkit/blob/main/setup.py")
    assert linked("[a](https://example.org/x.md) [b](#c)") == "[a](https://example.org/x.md) [b](#c)"
    assert linked("```\n[a](../setup.py)\n```") == "```\n[a](../setup.py)\n```"
    with pytest.raises(ValueError, match=r"links to \.\./nothing\.md, which does not exist"):
        linked("[a](../nothing.md)")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_valid_and_what_it_calls_exists(path: Path):
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    output_of(*check)
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^(?:\S+=\S+ )*make ([a-z]+)\b", commands, re.MULTILINE)) <= targets
    for module in re.findall(r"-m ((?:tests|benchmarks|tools)[\w.]+)", commands):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for file in re.findall(r"\btests/\S+\.py\b", commands):
        assert (ROOT / file).exists(), file


def test_every_fuzzer_of_the_reader_runs_at_night():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]
    harnesses = {path.stem.removeprefix("fuzz_") for path in (ROOT / "csrc/package/tests").glob("fuzz_*.cpp")}
    assert set(jobs["reader"]["strategy"]["matrix"]["harness"]) == harnesses
