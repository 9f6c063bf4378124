import pytest

from tools.generated import with_section

TEXT = "a\n<!-- x: written by `make docs` -->\nold\n<!-- /x -->\nb\n"


def test_a_section_is_replaced_and_nothing_else():
    assert with_section(TEXT, "x", r"new \1" + "\n") == TEXT.replace("old", r"new \1")


@pytest.mark.parametrize("text", ["", TEXT + TEXT])
def test_a_section_must_be_there_once(text: str):
    with pytest.raises(ValueError, match="expected one section 'x'"):
        with_section(text, "x", "new\n")
