"""The Python and the C++ reader: the same verdict on every file. The fixture in conftest.py holds the one against the
other wherever a test here or beside this one opens a package; these tests make packages on which parsers differ."""

from __future__ import annotations

import functools
import json
import operator
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exportkit import errors
from exportkit.errors import ManifestSyntaxError, PackageError
from tests.adversarial.forge import changed, document, package, records
from tests.adversarial.test_fuzz import PLACES, opened

BOUNDED = settings(
    max_examples=300, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HEADER = Path(__file__).parents[2] / "csrc" / "runtime" / "package" / "errors.h"

_NUMBERS = [
    *("0", "-0", "1", "-1", "1.0", "-0.0", "1e0", "1E+2", "2e-3", "0e999", "1e-999", "1e999", "-1e999"),
    *("4611686018427387904", "4611686018427387905", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775808", "-9223372036854775809", "18446744073709551616", "1e9999999999999999999"),
    *("1e9223372036854775807", "1.5e-9223372036854775808", "0e9223372036854775807", "0.0e99999999999999999999"),
    *("0.001e9223372036854775807", "0.1e-99999999999999999999", "0e-1", "0.00e400"),
    *("01", "1.", ".5", "+1", "1e", "0x1", "--1", "-", "NaN", "Infinity", "-Infinity"),
    *("nul", "True", "truex", "null", "true"),
]
_LONG_NUMBERS = ["9" * 30, "-" + "9" * 30, "9" * 309, "1" + "0" * 4299, "1" + "0" * 4300, "-1" + "0" * 4299]
_LONG_NUMBERS += ["0." + "0" * 5000 + "1", "1" + "0" * 400 + "e-400"]
_CONTAINERS = [
    *("[]", "{}", "[[]]", "[1,]", "[,]", "[1 2]", '{"a":1,}', '{"a" 1}', '{"a":1,"a":1}', '{"\\u0061":1,"a":2}'),
    '{"type":"tensor","index":0}',
]
_STRINGS = [
    *('""', '"a"', '"cpu"', '"2.13"', '"\\u0000"', '"\x00"', '"\x1f"', '"\x7f"', '"\\x41"', '"\\/"', '"\\u00e9"'),
    *('"\u00e9"', '"\U0001f600"', '"\\ud800"', '"\\udc00"', '"\\ud83d\\ude00"', '"\\ud800\\u0041"', '"\\ud800\\u"'),
    *('"\\ud800\\ud800\\udc00"', '"\\u+041"', '"\\u 041"', '"open', '"2\u0661.1"', '"\u0662.\u0661"', '"cla\u00dfe"'),
]
_NO_JSON = ["\ufeff1", "\u00a01", "1\u2028", "/*c*/1", "1//c", "'a'", "1\x00"]
LITERALS = [*_NUMBERS, *_LONG_NUMBERS, *_CONTAINERS, *_STRINGS, *_NO_JSON]


def kinds_of_places() -> dict[str, tuple[Any, ...]]:
    """One place for each key of the manifest, by its path."""
    return {re.sub(r"\d+", "0", ".".join(map(str, place))): place for place in reversed(PLACES)}


@pytest.mark.parametrize("kind", kinds_of_places())
def test_every_literal_in_every_place(file: Path, kind: str) -> None:
    whole: Any = document()
    *parents, last = kinds_of_places()[kind]
    functools.reduce(operator.getitem, parents, whole)[last] = "PLACEHOLDER"
    text = json.dumps(whole, ensure_ascii=False)
    for literal in LITERALS:
        opened(file, package(text.replace('"PLACEHOLDER"', literal).encode()))


@pytest.mark.parametrize("version", ["1", "2", "7", "-0", "1.0", "3", "9" * 4300, "9" * 4301])
def test_every_literal_beside_another_version(file: Path, version: str) -> None:
    for literal in LITERALS:
        for text in (f'{{"format_version":{version},"x":{literal}}}', f'{{"x":{literal},"format_version":{version}}}'):
            assert isinstance(opened(file, package(text.encode())), PackageError)
    opened(
        file, package(json.dumps(document()).replace('"format_version": 2', f'"format_version": {version}').encode())
    )


@pytest.mark.parametrize(
    "data", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98"]
)
def test_what_is_not_utf_8_is_not_json(file: Path, data: bytes) -> None:
    text = json.dumps(changed("version", "PLACEHOLDER")).encode().replace(b"PLACEHOLDER", data)
    assert isinstance(opened(file, package(text)), ManifestSyntaxError)


TEXT = json.dumps(document()).encode()
FRAGMENTS = st.sampled_from(
    [one.encode() for one in LITERALS if len(one) < 100] + [bytes([c]) for c in b'{}[]",:\\ \n\t\r\x0b']
)


@BOUNDED
@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 40), FRAGMENTS), min_size=1, max_size=3))
def test_manifests_with_pieces_cut_out_and_put_in(file: Path, edits: list[tuple[int, int, bytes]]) -> None:
    text = TEXT
    for at, length, piece in edits:
        text = text[:at] + piece + text[at + length :]
    opened(file, package(text))


names = st.text(min_size=1, max_size=3) | st.sampled_from(
    ["class", "_a", "a.b", "", "0", "\u00e9", "x\u0301", "\U0001d4d0"]
)
nodes = st.recursive(
    st.just({"type": "tensor"}) | st.fixed_dictionaries({"type": st.just("constant"), "value": st.none() | st.text()}),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: {"type": "sequence", "kind": "tuple", "items": items})
        | st.lists(st.tuples(names, inner), max_size=3).map(
            lambda pairs: {"type": "mapping", "keys": [key for key, _ in pairs], "items": [item for _, item in pairs]}
        )
        | st.tuples(names, st.lists(st.tuples(names, inner), max_size=3)).map(
            lambda given: {
                "type": "namedtuple",
                "class_name": given[0],
                "fields": [key for key, _ in given[1]],
                "items": [item for _, item in given[1]],
            }
        )
    ),
    max_leaves=8,
)


@BOUNDED
@given(nodes, st.booleans())
def test_structures_of_all_kinds(file: Path, node: dict[str, object], renumber: bool) -> None:
    found: list[str] = []

    def visit(part: dict[str, object], path: str) -> None:
        if part["type"] == "tensor":
            part["index"] = len(found) if renumber else 0
            found.append(path or "0")
        items = part.get("items", [])
        assert isinstance(items, list)
        for index, item in enumerate(items):
            keys = part.get("keys", part.get("fields", [str(i) for i in range(len(items))]))
            assert isinstance(keys, list)
            visit(item, f"{path}.{keys[index]}" if path else keys[index])

    node = json.loads(json.dumps(node))  # hypothesis may use one part twice
    visit(node, "")
    whole = changed("call.result", node)
    output = whole["call"]["outputs"][0]
    whole["call"]["outputs"] = [{**output, "name": name} for name in found]
    opened(file, package(json.dumps(whole).encode()))


def test_records_of_all_lengths_and_names_in_the_order_of_code_points(file: Path) -> None:
    lengths = [0, 1, 15, 16, 63, 64, 65, 255, 4096, 262_143, 262_144, 262_145, 1_048_577]
    contents = {
        f"data/weights/{'x' * (i % 7)}{length}": bytes(range(256)) * (length // 256) + bytes(length % 256)
        for i, length in enumerate(lengths)
    }
    assert not isinstance(opened(file, package(contents=dict(sorted({**records(), **contents}.items())))), PackageError)


@pytest.mark.parametrize("asked_for", [(), (20,), (24,), (42,), (20, 24), (20, 24, 42)])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 15, 16, 23, 24, 25, 28, 31, 32, 100])
def test_zip64_fields_that_are_cut_short_or_not_asked_for(file: Path, asked_for: tuple[int, ...], length: int) -> None:
    data = bytearray(package())
    for entry in re.finditer(rb"PK\x01\x02", package()):
        start = entry.start()
        for at in (20, 24, 42):  # sizes and offset in 32 bits
            struct.pack_into("<I", data, start + at, 0xFFFFFFFF if at in asked_for else 0)
        struct.pack_into("<H", data, start + 46 + struct.unpack_from("<H", data, start + 28)[0] + 2, length)
    answer = opened(file, bytes(data))
    assert isinstance(answer, PackageError) or (len(asked_for), length // 8 * 8) == (3, 24)


def test_the_classes_of_the_two_languages_have_one_name_and_one_exit_code() -> None:
    for name, code in re.findall(r'ErrorClass k\w+\{"(\w+)", (\d)\}', HEADER.read_text()):
        assert getattr(errors, name).exit_code == int(code)
    in_cpp = set(re.findall(r'\{"(\w+)", 3\}', HEADER.read_text()))
    in_python = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PackageError)
    }
    assert in_cpp == in_python - {"PackageError"}
