"""Builds the site and the man page from the documents: `python -m tools.site build/site`.

The documents are written for a reader of the repository: their links are relative. Here each page gets its place in the
site, and each link leads there, or to the file on the project's host. A link that leads nowhere is an error, and so is
everything that Sphinx warns of. No network is needed.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from exportkit.bench.results import OURS_GRAPHS
from exportkit.bench.tables import number
from tools.command_reference import reference
from tools.generated import DOCS, ROOT
from tools.results_tables import load_half_results

MAN_PAGE = DOCS / "exportkit.1"
_TRITON = ROOT / "benchmarks" / "triton_results" / "nvidia-h200.json"
_HOST = "https://github.com/exportkit/exportkit/blob/main/"

_ELSEWHERE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "RELEASE.md": "release.md",
    "CHANGELOG.md": "changelog.md",
    "exportkit/package/FORMAT.md": "format.md",
    "csrc/arr_coc/README.md": "kernels.md",
    "csrc/arr_coc/common/README.md": "helpers.md",
    "docs/README.md": "index.md",
    "docs/adr/README.md": "adr/index.md",
}
"""Pages whose place in the site is not their place in docs/."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def pages() -> dict[str, str]:
    """Returns the place in the site of each page, by its path in the repository."""
    found = [path.relative_to(ROOT).as_posix() for path in (*DOCS.glob("*.md"), *DOCS.glob("[ae]*/*.md"))]
    return {path: path.removeprefix("docs/") for path in sorted(found)} | _ELSEWHERE


def gather(folder: Path) -> None:
    """Writes what Sphinx reads: the pages with links of the site, and the pictures.

    Raises:
        ValueError: A link leads to a file that does not exist.
    """
    shutil.copytree(DOCS / "site", folder, dirs_exist_ok=True)
    places = pages()
    for source, place in places.items():
        if place != "index.md":
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            text = reference() if source == "docs/cli.md" else (ROOT / source).read_text()
            (folder / place).write_text(with_links_of_the_site(text, source, places))
    for picture in DOCS.rglob("*"):
        if picture.suffix in (".png", ".svg"):
            shutil.copy(picture, folder / picture.relative_to(DOCS))
    front = (folder / "index.md").read_text()
    (folder / "index.md").write_text(front.replace("<!-- figures -->", figures()))
    (folder / "adr" / "index.md").write_text(_with_contents(folder / "adr"))


def with_links_of_the_site(text: str, source: str, places: dict[str, str]) -> str:
    """Returns a page's text with its relative links replaced.

    Args:
        text: The page.
        source: Its path in the repository.
        places: The places in the site of all pages.

    Raises:
        ValueError: A link leads to a file that does not exist.
    """
    here = posixpath.dirname(places[source])

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["path"]))
        if not (ROOT / path).exists():
            raise ValueError(f"{source} links to {link['path']}, which does not exist")
        anchor = link["anchor"] or ""
        if path in places:
            return posixpath.relpath(places[path], here or ".") + anchor
        if path.startswith("docs/") and path.endswith((".png", ".svg")):
            return posixpath.relpath(path.removeprefix("docs/"), here or ".")
        return _HOST + path + anchor

    parts = _FENCE.split(text)  # the odd ones are code
    return "".join(part if number % 2 else _LINK.sub(replaced, part) for number, part in enumerate(parts))


def figures() -> str:
    """Returns the three figures of the front page, from the results and the table that the documents show."""
    rows = {(row.subject, row.dtype, row.size): row for run in load_half_results() for row in run.rows}
    image = rows["arr_coc_vit_small", "bfloat16", "batch=1, gh=28, gw=28"]
    ours, other = (image.time(name) for name in (OURS_GRAPHS, "reduce-overhead"))
    assert ours is not None
    assert other is not None
    table = (DOCS / "performance.md").read_text()
    loaders = r"^\| (?:`exportkit.load`|torch's `load_package`).*\| ([\d.]+ m?s) \|$"
    load, torch_load = re.findall(loaders, table, re.MULTILINE)
    triton = next(
        row for row in json.loads(_TRITON.read_text())["rows"] if row["model"] == "vit" and "=32" in row["size"]
    )
    cards = {
        load: f"to load a package of a vision model. torch's own loader takes {torch_load}.",
        f"{number(ours.median)} ms": (
            "for an image through ViT-small on an H200. torch.compile, with CUDA graphs too, takes "
            f"{number(other.median)} ms."
        ),
        f"{triton['triton_rows']} images/s": (
            "through ViT-small behind Triton, on one H200: "
            f"{triton['triton_rows'] / triton['direct_rows']:.2f} of direct calls."
        ),
    }
    texts = [f":::{{container}} card\n{figure}\n\n{text}\n:::\n" for figure, text in cards.items()]
    return "\n".join(["::::{container} figures\n", *texts, "::::"])


def _with_contents(folder: Path) -> str:
    """Returns the page of the decisions with the list that Sphinx wants to have."""
    names = sorted(path.stem for path in folder.glob("[0-9]*.md"))
    return "\n".join([(folder / "index.md").read_text(), ":::{toctree}", ":hidden:", "", *names, ":::", ""])


def build(source: Path, output: Path, builder: str, *settings: str) -> None:
    """Runs Sphinx. Every warning is an error.

    Args:
        source: What `gather` wrote.
        output: Where the result is written.
        builder: Sphinx's name of the form, `html` or `man`.
        settings: `NAME=VALUE`, in place of those in conf.py.

    Raises:
        subprocess.CalledProcessError: Sphinx warned of something, and said what.
    """
    # What Sphinx keeps of a page depends on the form: quotes are curled for a browser only.
    options = ["-q", "-W", "--keep-going", "-j", "1", "-d", str(source / f".doctrees-{builder}")]
    options += [word for setting in settings for word in ("-D", setting)]
    subprocess.run([sys.executable, "-m", "sphinx", *options, "-b", builder, str(source), str(output)], check=True)


def man_page(source: Path) -> str:
    """Returns the manual page of the command line. Sphinx reads no other page, so it knows not where links lead."""
    others = [str(page.relative_to(source)) for page in source.rglob("*.md") if page != source / "cli.md"]
    unknown = "suppress_warnings=misc.highlighting_failure,myst.xref_missing"
    with tempfile.TemporaryDirectory() as folder:
        build(source, Path(folder), "man", "root_doc=cli", f"exclude_patterns={','.join(others)}", unknown)
        return Path(folder, "exportkit.1").read_text()


def main() -> None:
    """Builds both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        gather(Path(folder))
        build(Path(folder), output, "html")
        MAN_PAGE.write_text(man_page(Path(folder)))
    print(f"{output / 'index.html'} and {MAN_PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
