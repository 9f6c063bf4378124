"""Manifests on which parsers differ, and strings and numbers that harm who prints or computes with them: none does."""

from __future__ import annotations

import copy
import json
import math
import re
import struct
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exportkit.errors import ManifestConsistencyError, ManifestSyntaxError, PackageError
from exportkit.package.manifest import ConstantNode, Manifest, MappingNode, Size, TensorNode
from exportkit.sizes import plan_sizes
from tests.adversarial.forge import (
    TENSOR,
    Refused,
    changed,
    document,
    named_tuple,
    package,
    records,
    replaced,
    value_at,
)
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


# --- strings: what they do to whoever prints an error -----------------------------------------------------------------

FORGED = "x\nFAKE LINE\r\x1b[31m\x9b\u202e\u2028"


def check_printable(answer: Manifest | PackageError) -> None:
    """An error says it all in lines of its own."""
    if isinstance(answer, PackageError):
        said = answer.message + (answer.hint or "")
        assert not [letter for letter in said if unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp")], said


@pytest.mark.parametrize("kind", kinds_of_places())
def test_no_string_of_a_manifest_makes_a_line_of_an_error(file: Path, kind: str) -> None:
    sample, place = kinds_of_places()[kind]
    value = copy.deepcopy(value_at(sample.document, place))
    if isinstance(value, str):
        value += FORGED
    elif isinstance(value, list) and value:
        value.append(value[0])  # there twice
        if isinstance(value[0], dict):
            for key in value[0].keys() & {"name", "record"}:
                value[0][key] += FORGED
    elif isinstance(value, dict):
        value[FORGED] = 1
    for other in (FORGED, [FORGED, FORGED], {FORGED: FORGED}, value):
        check_printable(opened(file, package(replaced(sample.document, place, other), sample.contents)))


def test_no_key_that_is_there_twice_makes_a_line_of_an_error(file: Path) -> None:
    key = msgspec.json.encode(FORGED)
    check_printable(opened(file, package(b'{"format_version":1,%s:1,%s:2}' % (key, key))))
    two = {"type": "mapping", "keys": [FORGED, FORGED], "items": [TENSOR] * 2}
    check_printable(opened(file, package(changed("call.result", two))))


# --- names ------------------------------------------------------------------------------------------------------------

KEYWORDS = ("class", "None", "True", "def", "async", "lambda")


def with_parameter(name: str) -> dict[str, Any]:
    return changed("call.inputs.0.name", name, changed("call.parameters.0.name", name))


@pytest.mark.parametrize("name", ["d\u00e9", "\u2102", "\ufb01", "", "a b", "1a", "a\n", "A\nimport os", *KEYWORDS])
def test_rule_9_names_are_ascii_and_no_keywords(refused: Refused, name: str) -> None:
    refused(package(with_parameter(name)), ManifestConsistencyError, "name")
    for kind in (named_tuple(name, "x"), named_tuple("P", name)):
        refused(package(changed("call.result", kind)), ManifestConsistencyError, "not allowed as the name")


@pytest.mark.parametrize("name", ["match", "type", "_", "print", "x1", "CamelCase"])
def test_words_that_are_none_of_the_list_are_names(file: Path, name: str) -> None:
    named = changed("call.outputs.0.name", "x", changed("call.result", named_tuple(name, "x")))
    for whole in (named, with_parameter(name)):
        assert isinstance(opened(file, package(whole)), Manifest)


@pytest.mark.parametrize("fields", [("\ufb01", "fi"), ("\u2102", "C"), ("\u00aa", "a"), ("\u017f", "s")])
def test_rule_9_fields_that_are_one_to_python_are_refused(refused: Refused, fields: tuple[str, str]) -> None:
    whole = changed("call.outputs.0.name", fields[0], changed("call.result", named_tuple("P", *fields)))
    refused(package(whole), ManifestConsistencyError, "not allowed as the name")


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1, 2**31, 2**62, 2**63 - 1])
@pytest.mark.parametrize("offset", [0, 2**62, 2**63 - 1, -(2**62), -(2**63 - 1), -(2**63)])
@pytest.mark.parametrize("ends", [(3, 3), (0, 0), (0, 2**62), (2**62, 2**62), (1, 64)])
def test_sizes_that_overflow_64_bits_are_refused_and_others_computed(
    file: Path, scale: int, offset: int, ends: tuple[int, int]
) -> None:
    size = {"dimension": "batch", "scale": scale, "offset": offset}
    whole = changed("call.inputs.0.shape", [{"dimension": "batch", "scale": 1, "offset": 0}, size, 0])
    whole["methods"][0]["call"]["dimensions"][0] |= {"min": ends[0], "max": ends[1]}
    whole["cases"][0]["calls"][0]["sizes"]["batch"] = ends[0]
    answer = opened(file, package(whole))
    low, high = (scale * end + offset for end in ends)
    assert isinstance(answer, Manifest) == (low >= 0 and high <= 2**62), answer
    if isinstance(answer, Manifest):
        assert answer.call.inputs[0].shape[1] == Size(dimension="batch", scale=scale, offset=offset)
        plan_sizes(answer.call, 4, seed=0, max_bytes=1 << 20)


def test_a_mapping_may_have_any_keys(file: Path) -> None:
    """Only what becomes a name in Python has the rules of names."""
    result = {"type": "mapping", "keys": ["class d\u00e9"], "items": [TENSOR]}
    answer = opened(file, package(changed("call.outputs.0.name", "class d\u00e9", changed("call.result", result))))
    assert isinstance(answer, Manifest)
    assert answer.call.result == MappingNode(keys=("class d\u00e9",), items=(TensorNode(index=0),))
