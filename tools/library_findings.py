"""Writes what `exportkit ops check` found in fbgemm into docs/operator-check.md: `python -m tools.library_findings`.

`python -m tools.library_findings FILE` takes what `exportkit ops check fbgemm_gpu --json > FILE` wrote.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tools.generated import DOCS, ROOT, with_section

DOCUMENT = DOCS / "operator-check.md"
RUN = ROOT / "benchmarks" / "operators" / "fbgemm-gpu-cpu-1.8.0.json"
_ROW = 5  # operators that a finding needs for a row of its own


def kept(results: Path) -> dict[str, Any]:
    """Returns what is kept of a run: of each operator why it was not checked, and its findings without their calls."""
    document = json.loads(results.read_text())
    operators = {
        line["report"]["operator"]: {
            "seconds": line["seconds"],
            "not_checked": line["not_checked"],
            "findings": [{key: f[key] for key in ("check", "severity", "message")} for f in line["report"]["findings"]],
        }
        for line in document["operators"]
    }
    return {"source": document["source"], "torch": importlib.metadata.version("torch"), "operators": operators}


def section(run: dict[str, Any]) -> str:
    """Returns the counts, and a table of findings with the first operator of each."""
    operators = run["operators"].values()
    broken = sum(any(f["severity"] == "broken" for f in each["findings"]) for each in operators)
    reasons = [str(each["not_checked"] or "") for each in operators]
    minutes = sum(each["seconds"] for each in operators) / 60
    text = (
        f"{len(reasons)} operators in {minutes:.0f} minutes with torch {run['torch']}: {broken} are broken, "
        f"{sum(why.startswith('it has kernels for') for why in reasons)} have no CPU kernel, for "
        f"{sum(why.startswith('no valid call') for why in reasons)} no valid call was found.\n\n"
    )
    seen: dict[str, list[tuple[str, str]]] = {}
    for name, each in run["operators"].items():
        for finding in each["findings"]:
            seen.setdefault(finding["check"], []).append((finding["severity"], name.partition("::")[2]))
    lines = ["| finding | operators | such as |", "| --- | --- | --- |"]
    rare = sorted(check for check, found in seen.items() if len(found) < _ROW)
    for check, found in sorted(seen.items(), key=lambda item: (-len(item[1]), item[0])):
        counts = Counter(severity for severity, _ in found)
        said = ", ".join(f"{counts[kind]} {kind}" for kind in ("broken", "doubtful", "note") if counts[kind])
        if check not in rare:
            lines.append(f"| `{check}` | {said} | `{found[0][1]}` |")
    return text + "\n".join(lines) + f"\n\nOf fewer than {_ROW}: {', '.join(f'`{check}`' for check in rare)}.\n"


def written(document: str) -> str:
    """Returns the document with the run that is kept."""
    return with_section(document, "fbgemm", section(json.loads(RUN.read_text())))


if __name__ == "__main__":
    for given in sys.argv[1:]:
        RUN.write_text(json.dumps(kept(Path(given)), indent=1) + "\n")
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
