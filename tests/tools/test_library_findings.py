import json
from pathlib import Path

from tools.library_findings import DOCUMENT, kept, section, written


def test_the_document_has_the_run_that_is_kept():
    assert DOCUMENT.read_text() == written(DOCUMENT.read_text()), "stale: run `make docs`"


def test_a_run_is_counted_by_finding_with_an_operator_of_each(tmp_path: Path):
    finding = {"check": "crash", "severity": "broken", "message": "It died.", "call": "torch.ops.a.b0()", "hint": None}
    lines = []
    for number in range(6):
        report = {"operator": f"a::b{number}", "findings": [finding] if number else []}
        why = None if number else "no valid call was found: 3 drawn calls were refused"
        lines.append({"report": report, "seconds": 20.0, "not_checked": why})
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"source": "a", "operators": lines}))
    text = section(kept(file))
    assert "6 operators in 2 minutes with torch" in text
    assert ": 5 are broken, 0 have no CPU kernel, for 1 no valid call" in text
    assert "| `crash` | 5 broken | `b1` |" in text
    assert "torch.ops" not in text
