import json
from pathlib import Path

from exportkit.operators.contract.definition import checks
from tools.library_findings import DOCUMENT, RUN, kept, section, written


def test_the_document_has_the_run_that_is_kept():
    assert DOCUMENT.read_text() == written(DOCUMENT.read_text()), "stale: run `make docs`"
    found = {f["check"] for each in json.loads(RUN.read_text())["operators"].values() for f in each["findings"]}
    assert found - {"crash", "hang", "memory"} <= set(checks()), "a check has another name since: run it again"


def test_a_run_is_counted_by_finding_with_an_operator_of_each(tmp_path: Path):
    finding = {"check": "crash", "severity": "broken", "message": "It died.", "call": "torch.ops.a.b0()", "hint": None}
    lines = [{"source": "a", "torch": "2.13.0", "options": {}}]
    for number in range(6):
        report = {"operator": f"a::b{number}", "findings": [finding] if number else []}
        why = None if number else "no valid call was found: 3 drawn calls were refused"
        lines.append({"report": report, "seconds": 20.0, "not_checked": why})
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = section(kept(file))
    assert "6 operators in 2 minutes with torch 2.13.0: 5 are broken, 0 have no CPU kernel, for 1 no valid call" in text
    assert "| `crash` | 5 broken | `b1` |" in text
    assert "torch.ops" not in text
