"""The list of models to try says what is right, and torch's riddles are never right."""

from __future__ import annotations

from tools.try_models import Line, lines, right

LIST = """
# A comment
models.py:Net --input x=float32[4,8] --dynamic 'x:0=batch[1:8]' =>
models.py:Counting => the model changes its buffers
"""


def test_a_line_has_what_export_is_given_and_what_is_right() -> None:
    agreeing, refused = lines(LIST)
    assert agreeing.arguments == ("models.py:Net", "--input", "x=float32[4,8]", "--dynamic", "x:0=batch[1:8]")
    assert (agreeing.words, refused.words) == ("", "the model changes its buffers")


def test_a_refusal_is_right_with_its_words_and_without_riddles() -> None:
    line = Line(("models.py:Net",), "changes its buffers")
    assert right(line, "export, exit 5: the model changes its buffers tail")
    assert not right(line, "agrees")
    assert not right(line, "export, exit 5: INTERNAL ASSERT FAILED: changes its buffers")
    assert right(Line(("models.py:Net",), ""), "agrees")
    assert not right(Line(("models.py:Net",), ""), "verify, exit 1: it differs")
