"""Manifests and archives on which parsers differ: each is taken for what it says, or refused as a PackageError."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.errors import ManifestSyntaxError, PackageError
from exportkit.package.manifest import ConstantNode
from tests.adversarial.forge import changed, document, package, records, replaced
from tests.adversarial.test_fuzz import BOUNDED, PACKAGED, SIDECAR, Sample, opened

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


def kinds_of_places() -> dict[str, tuple[Sample, tuple[Any, ...]]]:
    """One place for each key of a manifest, by its path."""
    return {
        re.sub(r"\d+", "0", ".".join(map(str, place))): (sample, place)
        for sample in (SIDECAR, PACKAGED)
        for place in reversed(sample.places)
    }


@pytest.mark.parametrize("kind", kinds_of_places())
def test_every_literal_in_every_place_is_refused_or_means_something(file: Path, kind: str) -> None:
    sample, place = kinds_of_places()[kind]
    text = json.dumps(replaced(sample.document, place, "PLACEHOLDER"), ensure_ascii=False)
    for literal in LITERALS:
        opened(file, package(text.replace('"PLACEHOLDER"', literal).encode(), sample.contents))


@pytest.mark.parametrize("literal", LITERALS, ids=lambda literal: ascii(literal[:20]))
def test_a_literal_is_what_the_standard_library_reads_or_refused(file: Path, literal: str) -> None:
    """Of a constant, which may be any value that is no container."""
    whole = changed("call.parameters", [*document()["methods"][0]["call"]["parameters"], "HERE"])
    constant = '{"name":"c","kind":"keyword","value":{"type":"constant","value":' + literal + "}}"
    answer = opened(file, package(json.dumps(whole).replace('"HERE"', constant).encode()))
    try:
        value = json.loads(literal, parse_constant=lambda word: None if word == "null" else [])
    except ValueError:
        value = []
    allowed = value is None or isinstance(value, (bool, int, float, str))
    if isinstance(value, int):
        allowed = -(2**63) <= value < 2**63
    if isinstance(value, float):
        allowed = math.isfinite(value)
    if isinstance(value, str):
        allowed = not any(0xD800 <= ord(letter) < 0xE000 for letter in value)
    if not allowed:
        assert isinstance(answer, ManifestSyntaxError), answer
    else:
        assert not isinstance(answer, PackageError), answer
        node = answer.call.parameters[1].value
        assert isinstance(node, ConstantNode)
        assert (type(node.value), repr(node.value)) == (type(value), repr(value))


@pytest.mark.parametrize("version", ["1", "2", "7", "-0", "1.0", "9" * 4300, "9" * 4301])
def test_every_literal_beside_another_version(file: Path, version: str) -> None:
    for literal in LITERALS:
        for text in (f'{{"format_version":{version},"x":{literal}}}', f'{{"x":{literal},"format_version":{version}}}'):
            assert isinstance(opened(file, package(text.encode())), PackageError)


def test_what_is_not_utf_8_is_not_json(file: Path) -> None:
    text = json.dumps(changed("version", "PLACEHOLDER")).encode()
    for data in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98"):
        assert isinstance(opened(file, package(text.replace(b"PLACEHOLDER", data))), ManifestSyntaxError)


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


def test_records_of_all_lengths_and_names_in_the_order_of_code_points(file: Path) -> None:
    lengths = [0, 1, 15, 16, 63, 64, 65, 255, 4096, 262_143, 262_144, 262_145, 1_048_577]
    contents = {
        f"data/weights/{'x' * (i % 7)}{length}": bytes(range(256)) * (length // 256) + bytes(length % 256)
        for i, length in enumerate(lengths)
    }
    assert not isinstance(opened(file, package(contents=records(contents))), PackageError)


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
