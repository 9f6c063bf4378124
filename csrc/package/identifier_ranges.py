"""Writes identifier_ranges.inc, the non-ASCII characters that Python allows in a name.

Run it with the Python version to follow. The file notes its Unicode version. Later versions only add characters.
"""

import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path


def ranges(allowed: Callable[[str], bool]) -> list[tuple[int, int]]:
    """Returns the first and last code point of each run of allowed characters."""
    found: list[tuple[int, int]] = []
    for code in range(0x80, sys.maxunicode + 1):
        if not allowed(chr(code)):
            continue
        if found and found[-1][1] == code - 1:
            found[-1] = (found[-1][0], code)
        else:
            found.append((code, code))
    return found


def table(name: str, pairs: list[tuple[int, int]]) -> str:
    """Returns a C++ array with a few ranges per line."""
    cells = [f"{{0x{first:X}, 0x{last:X}}}," for first, last in pairs]
    lines, line = [], "   "
    for cell in cells:
        if len(line) + len(cell) + 1 > 118:
            lines.append(line)
            line = "   "
        line += " " + cell
    return f"constexpr Range {name}[] = {{\n" + "\n".join([*lines, line]) + "\n};\n"


if __name__ == "__main__":
    text = f"// Unicode {unicodedata.unidata_version}. Written by identifier_ranges.py.\n// clang-format off\n"
    text += table("kStart", ranges(str.isidentifier)) + table("kContinue", ranges(lambda c: f"a{c}".isidentifier()))
    Path(__file__).with_suffix(".inc").write_text(text)
