"""No text of an artifact ends the element that it stands in, steers the page, or makes it large."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from exportkit.report.untrusted import LONGEST, LeftOut, page_value, plain_text, script_json

TEXT = st.text(st.characters(), max_size=40) | st.sampled_from(
    ["</script>", "<!--", "]]>", "\u2028\u2029", "\u202eevil", "\ud800", "\x00\x1b[2J", "&lt;", "<script>"]
)
VALUES = st.recursive(
    TEXT | st.integers() | st.floats() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


@given(VALUES)
def test_a_document_stays_inside_of_its_element(value: object):
    text = script_json(value)
    assert text.isascii()
    assert not set(text) & set("<>&")
    assert json.loads(text) == page_value(value)


@given(TEXT)
def test_plain_text_is_visible(text: str):
    assert plain_text(text).replace("\n", "").isprintable()
    if text.isprintable():
        assert plain_text(text) == text


def test_long_text_is_shortened():
    shown = plain_text("x" * 10**6)
    assert shown == "x" * LONGEST + "... (1000000 characters)"


def test_what_is_left_out_is_noted():
    left_out = LeftOut()
    assert list(left_out.first(range(5), 5, "things")) == [0, 1, 2, 3, 4]
    assert left_out.notes == []
    assert list(left_out.first(range(5000), 2, "things")) == [0, 1]
    assert left_out.notes == ["4,998 of 5,000 things"]
