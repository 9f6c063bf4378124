from __future__ import annotations

import pytest

from tests.bench.test_results import results, row
from tools import results_tables


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


def test_the_documents_have_the_numbers_of_the_committed_results():
    stale = [path.name for path, text in results_tables.documents().items() if path.read_text() != text]
    assert stale == [], "run `make docs`"
