from __future__ import annotations

import json

import msgspec
import pytest

from exportkit.bench import tables
from exportkit.bench.results import OURS_GRAPHS, Results, Row, encode
from tests.bench.test_results import MACHINE, results, row
from tools import results_tables, serving_tables
from tools.results_tables import GOALS, README_ROWS, ReadmeRow

CPU = msgspec.structs.replace(MACHINE, device="a CPU, 2 threads", gpu=None)


def gpu_and_cpu() -> list[Results]:
    (subject, size), _ = next(iter(GOALS.items()))
    goal = msgspec.structs.replace(row(subject, eager=3.0), size=size)
    large = msgspec.structs.replace(row("op", eager=5.0), size="large", moved_bytes=10**6)
    return [results(goal, row("other", eager=2.0)), results(row("op", eager=7.0), large, machine=CPU)]


def test_the_summary_shows_goals_and_packages_of_one_size_on_a_gpu():
    (subject, _), goal = next(iter(GOALS.items()))
    gpu, cpu = gpu_and_cpu()
    packages = [
        msgspec.structs.replace(row(name, eager=4.0), size=size, dtype=dtype, limit=None)
        for name, size, dtype in (
            ("arr_coc_vit_small", "batch=1, gh=28, gw=28", "bfloat16"),
            ("arr_coc_vit_base", "batch=1, gh=28, gw=28", "bfloat16"),
            ("arr_coc_vit_small", "batch=1, gh=64, gw=64", "bfloat16"),
        )
    ]
    text = results_tables.summary([gpu, cpu], [results(*packages)])
    assert f"| {subject} " in text
    assert f"{goal:.3f}" in text
    assert "| other " not in text
    assert text.count("| arr_coc_vit_small ") == 1
    assert "arr_coc_vit_base" not in text
    assert f"### {CPU.device}" in text


def test_the_measurements_show_every_row():
    text = results_tables.measurements(gpu_and_cpu(), [results(row("half", eager=2.0))], [results(row("package"))])
    for shown in ("| other ", "7.00x", "| half ", "| package "):
        assert shown in text


def test_saturation_shows_rows_and_their_part_of_direct_calls(tmp_path, monkeypatch):
    saturation = {"rows_per_second": 500.0, "elapsed": 2.0, "batches of 1": 600, "batches of 2": 200}
    rounds = [{"exportkit": {"saturation": saturation}, "direct": {"many": {"1": 0.001, "2": 0.0015}}}]
    (tmp_path / "load.json").write_text(json.dumps(rounds))
    monkeypatch.setattr(serving_tables, "RESULTS", tmp_path)
    run = serving_tables.Run("load", "a model", "a machine")
    assert serving_tables.saturation(run) == "500, 0.45"  # (600 * 0.001 + 200 * 0.0015) / 2


def test_the_readme_shows_its_rows_and_names_both_machines():
    def measured(wanted: ReadmeRow) -> Row:
        times = {"eager": 4.0, OURS_GRAPHS: 0.5, "reduce-overhead": 0.75}
        return msgspec.structs.replace(row(wanted.subject, **times), size=wanted.size, dtype=wanted.dtype or "float32")

    rows = [measured(wanted) for wanted in README_ROWS]
    half = [one for one in rows if one.dtype != "float32"]
    found = [results(*rows), results(*rows, machine=CPU)]
    lines = results_tables.readme_section(found, [results(*half)]).splitlines()
    assert lines[2] == f"| {README_ROWS[0].description} | GPU | 1.00 | 4.00 | - |"
    assert lines[3] == f"| {README_ROWS[1].description} | GPU | 0.500 | 4.00 | 0.750 |"
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(README_ROWS) == 9
    assert lines[-1] == "Medians. GPU: a GPU. CPU: a CPU, 2 threads."


def test_a_row_that_was_not_measured_is_an_error():
    with pytest.raises(StopIteration):
        results_tables.readme_section(gpu_and_cpu(), [])


@pytest.mark.slow
def test_a_plot_is_drawn_and_is_the_same_file_again(tmp_path):
    pytest.importorskip("matplotlib")
    from tools.results_plot import draw

    for name in ("a.svg", "b.svg", "c.png"):
        draw(results(row("op", eager=4.0, strange=2.0), row("longer_name", 0.1, eager=0.3)), tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "longer_name" in text
    assert (tmp_path / "c.png").stat().st_size > 1000


def test_runs_of_one_machine_become_one_with_the_newest_of_each_row():
    old = results(row("a", 1.0), row("b", 1.0))
    new = results(row("b", 2.0), row("c", 2.0), created="2026-02-01T00:00:00Z")
    (found,) = results_tables.merged([new, old])
    assert [(r.subject, r.time("exportkit").median) for r in found.rows] == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    assert found.created == new.created
    assert found.command.splitlines() == [old.command, new.command]


def test_a_plot_is_named_after_its_device():
    assert results_tables.plot_of(gpu_and_cpu()[0]).name == "performance-a-gpu.svg"


def test_packages_and_onnx_runtime_stand_side_by_side_with_their_machine():
    lines = results_tables.runs_section([results(row("arr_coc", onnxruntime=2.0), machine=CPU)]).splitlines()
    assert lines[0] == tables.heading(results(machine=CPU))
    assert [" ".join(lines[at].split()) for at in (2, 4)] == [
        "| what | size | exportkit ms | ONNX Runtime ms | of limit | vs best |",
        "| arr_coc | 2x3 | 1.00 | 2.00 | 50% | 2.00x (onnxruntime) |",
    ]


def test_packages_in_half_precision_are_ordered_by_size(tmp_path):
    sizes = ["batch=64, gh=28, gw=28", "batch=1, gh=64, gw=64", "batch=8, gh=28, gw=28"]
    for name, size in enumerate(sizes):
        run = results(msgspec.structs.replace(row("arr_coc"), size=size))
        (tmp_path / f"{name}.json").write_bytes(encode(run))
    (run,) = results_tables.load_half_results(tmp_path)
    assert [found.size for found in run.rows] == [sizes[2], sizes[0], sizes[1]]


def test_the_documents_have_the_numbers_of_the_committed_results():
    stale = [path.name for path, text in results_tables.documents().items() if path.read_text() != text]
    assert stale == [], "run `make docs`"
