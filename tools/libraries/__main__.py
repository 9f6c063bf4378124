"""Tries the libraries of the table that are installed, and writes docs/evidence/libraries.md.

    python -m tools.libraries [NAME ...] [--device cpu|cuda] [--output RESULTS.json]
    python -m tools.libraries --table RESULTS.json ...

A NAME is a row's, or its first word. Nothing is fetched or installed: what is missing is left out, and how to install
it is said.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.libraries.page import DOCUMENT, page
from tools.libraries.rows import ROWS
from tools.libraries.steps import Result, missing, tried


def main() -> int:
    """Prints a line for each library. Returns whether one did not become a package that runs without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="libraries to try; default: all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("-o", "--output", type=Path, metavar="RESULTS.json")
    parser.add_argument("--table", nargs="+", type=Path, metavar="RESULTS.json", help="write the page of these")
    options = parser.parse_args()
    if options.table:
        DOCUMENT.write_text(page([result for file in options.table for result in json.loads(file.read_text())]))
        return 0
    results: list[Result] = []
    for row in ROWS:
        if options.names and not {row.name, row.name.split()[0]} & set(options.names):
            continue
        why = missing(row) or ("" if options.device in row.devices else f"it has no kernels for {options.device}")
        if why:
            print(f"{row.name}: left out, {why}", flush=True)
            continue
        results.append(tried(row, options.device))
        print(f"{row.name}, {options.device}, torch {results[-1]['torch']}:", flush=True)
        for step, said in results[-1]["steps"].items():
            print(f"  {step}: {'' if said['ok'] else 'NOT, '}{said['said']}", flush=True)
        if options.output:
            options.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(not all(result["steps"].get("run", {}).get("ok") for result in results))


if __name__ == "__main__":
    sys.exit(main())
