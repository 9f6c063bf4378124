"""What a manifest's strings and numbers may do to whoever prints an error, makes a name or computes a size: nothing."""

from __future__ import annotations

import copy
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exportkit.errors import ManifestConsistencyError, PackageError
from exportkit.package.manifest import Manifest, MappingNode, Size, TensorNode
from exportkit.sizes import plan_sizes
from tests.adversarial.forge import TENSOR, Refused, changed, named_tuple, package, replaced, value_at
from tests.adversarial.test_fuzz import opened
from tests.adversarial.test_hostile_json import kinds_of_places

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
