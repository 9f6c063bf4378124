"""Writes a report: one HTML file that needs nothing else, asks for nothing, and runs only the script it came with."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from exportkit import web
from exportkit.errors import UsageError
from exportkit.package.archive import PackageReader
from exportkit.package.atomic import write_whole
from exportkit.package.exported_graph import ProgramGraph, ProgramGraphError, graph_in, graph_of
from exportkit.package.manifest import Manifest
from exportkit.package.node_times import Profile, read_profile
from exportkit.report.case_numbers import case_numbers
from exportkit.report.graph_data import graph_data
from exportkit.report.package_data import Words, compiled_calls, package_data
from exportkit.report.untrusted import LeftOut, PageLimits, plain_text, script_json
from exportkit.report.verification import read_verification

_STATIC = Path(__file__).with_name("static")
_STYLES = (web.STATIC / "page.css", _STATIC / "report.css")
# Each after those that it imports from.
_SCRIPTS = (
    web.STATIC / "dom.js",
    web.STATIC / "theme.js",
    *(
        _STATIC / f"{name}.js"
        for name in (
            "text",
            "layers",
            "scene",
            "graph_drawing",
            "graph_camera",
            "graph_details",
            "graph_view",
            "charts",
            "sections",
        )
    ),
    _STATIC / "report.js",
)
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "(?:[^"]*/)?(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (function\*?|class|const) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class ReportSources:
    """Files beside the artifact that a report is made from; None for those that there are not.

    Attributes:
        program: A file with the ExportedProgram of the model, for an artifact that has none.
        profile: What `exportkit bench --profile` wrote.
        verification: What `exportkit verify --json` printed.
    """

    program: Path | None = None
    profile: Path | None = None
    verification: Path | None = None


def write_report(
    reader: PackageReader, words: Words, sources: ReportSources, out: Path, limits: PageLimits = PageLimits()
) -> int:
    """Writes the page about an open package whose digests were checked.

    Args:
        reader: The package.
        words: The manifest in words.
        sources: The other files.
        out: The file to write. An existing file is replaced when the page is complete.
        limits: How much the page has room for.

    Returns:
        The size of the page in bytes.

    Raises:
        UsageError: A file of `sources` is not what it should be, or belongs to another artifact.
        PackageError: The given program cannot be read.
        OSError: The page cannot be written.
    """
    page = page_of(report_data(reader, words, sources, limits)).encode()
    write_whole(out, page)
    return len(page)


def report_data(
    reader: PackageReader, words: Words, sources: ReportSources, limits: PageLimits = PageLimits()
) -> dict[str, Any]:
    """Returns what the page shows. Arguments and errors are those of `write_report`."""
    left_out = LeftOut(limits)
    data = package_data(reader, words, left_out)
    data["numbers"] = case_numbers(reader, left_out)
    data["graphs"], data["no_graph"] = _graphs(reader, sources, left_out)
    data["compiled_calls"] = compiled_calls(reader, left_out)
    if sources.verification is not None:
        data["verification"] = read_verification(sources.verification, reader, left_out)
    data["left_out"] = left_out.notes
    return data


def page_of(data: Mapping[str, Any]) -> str:
    """Returns the page, given what it shows."""
    style = "\n".join(path.read_text() for path in _STYLES)
    script = "\n".join(_as_expression(path) for path in _SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    parts = {
        "policy": policy,
        "title": escape(plain_text(f"{data['name']} {data['version']}", 200)),
        "style": style,
        "data": script_json(data),
        "script": script,
    }
    template = (_STATIC / "report.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _as_expression(path: Path) -> str:
    """Returns a module as an object with what it exports, because a page that is one file cannot import others."""
    text = _IMPORT.sub(r"const \1 = in_\2;", path.read_text())
    exported = ", ".join(name for _, name in _EXPORT.findall(text))
    text = _EXPORT.sub(r"\1 \2", text)
    return f"const in_{path.stem} = (() => {{\n{text}return {{ {exported} }};\n}})();"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _graphs(
    reader: PackageReader, sources: ReportSources, left_out: LeftOut
) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the graph of each method, the default one's first, or why there is none."""
    manifest = reader.manifest
    names = [method.name for method in manifest.methods]
    if manifest.default is not None:
        names.sort(key=manifest.default.name.__ne__)
    profile = None if sources.profile is None else read_profile(sources.profile)
    graphs: list[dict[str, Any]] = []
    programs: list[ProgramGraph] = []
    try:
        for name in names:
            program = graph_of(reader, name) if sources.program is None else graph_in(sources.program, name)
            if program is None:
                if sources.profile is not None:
                    raise UsageError(
                        f"{reader.path} has no program, so a profile cannot be shown",
                        hint="Give the program that was profiled with --program.",
                    )
                return [], _no_graph(reader)
            if sources.program is not None:
                _check_same_model(reader, name, program, sources.program)
            graph = graph_data(program, manifest, left_out, name)
            graphs.append(graph | {"method": name} | _about(program, manifest, sources))
            programs.append(program)
    except ProgramGraphError as error:
        if sources.program is not None or sources.profile is not None:
            raise
        return [], error.message
    if profile is not None and sources.profile is not None:
        place = _profiled(profile, programs, sources.profile)
        graphs[place]["profile"] = _profile(profile)
    return graphs, None


def _about(program: ProgramGraph, manifest: Manifest, sources: ReportSources) -> dict[str, Any]:
    return {
        "sha256": program.sha256,
        "torch": program.torch,
        "file": sources.program.name if sources.program is not None else None,
        "same_weights": program.manifest is not None and program.manifest.source == manifest.source,
    }


def _no_graph(reader: PackageReader) -> str:
    if reader.manifest.onnx:
        return "The graph is in the ONNX model, which this page does not draw."
    return (
        "This package has compiled code only, from which the graph cannot be read. Export the model with "
        "--format program too, and give that file: exportkit inspect ... --program PROGRAM.pt2. The operators that the "
        'code calls are below, in order, under "Where it runs".'
    )


def _check_same_model(reader: PackageReader, method: str, program: ProgramGraph, path: Path) -> None:
    """Refuses the program of a model that is called differently."""
    ours = reader.manifest.method(method)
    call = ours.call
    if program.manifest is not None:
        theirs = program.manifest.method(method).call
        same = (call.parameters, call.inputs) == (theirs.parameters, theirs.inputs)
        same = same and [(o.name, o.dtype) for o in call.outputs] == [(o.name, o.dtype) for o in theirs.outputs]
        same = same and reader.manifest.state == program.manifest.state
    else:
        inputs = sum("user_input" in spec for spec in program.signature.input_specs)
        outputs = sum("user_output" in spec for spec in program.signature.output_specs)
        same = inputs >= len(call.inputs) + len(ours.state) and outputs >= len(call.outputs)
    if not same:
        raise UsageError(
            f"{path} is the program of another model: its inputs, outputs or state are not those of {reader.path}",
            hint="Export the program with the options that the artifact was exported with.",
        )


def _profiled(profile: Profile, programs: Sequence[ProgramGraph], path: Path) -> int:
    """Returns the place of the program that a profile belongs to."""
    for place, program in enumerate(programs):
        if profile.graph_sha256 == program.sha256 and len(profile.nodes) == len(program.graph.nodes):
            return place
    found = ", ".join(f"{program.sha256[:16]}..." for program in programs)
    raise UsageError(
        f"{path} is the profile of another program: of the graph {profile.graph_sha256[:16]}..., and this one is "
        f"{found}",
        hint="Profile this program with `exportkit bench PROGRAM.pt2 --profile`.",
    )


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "device": profile.device,
        "threads": profile.threads,
        "torch": profile.torch,
        "sizes": profile.sizes,
        "runs": profile.runs,
        "nodes": [[time.median, time.q1, time.q3] for time in profile.nodes],
    }
