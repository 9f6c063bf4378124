"""What `make docs` writes is what the code says today, and a section is replaced alone."""

from __future__ import annotations

from types import ModuleType

import pytest

from exportkit.arr_coc.ops import SPECS
from exportkit.operators.contract.definition import checks
from tools import check_table, command_reference, operator_table
from tools.generated import with_section

TEXT = "a\n<!-- x: written by `make docs` -->\nold\n<!-- /x -->\nb\n"


def test_a_section_is_replaced_and_nothing_else() -> None:
    assert with_section(TEXT, "x", r"new \1" + "\n") == TEXT.replace("old", r"new \1")


@pytest.mark.parametrize("text", ["", TEXT + TEXT])
def test_a_section_must_be_there_once(text: str) -> None:
    with pytest.raises(ValueError, match="expected one section 'x'"):
        with_section(text, "x", "new\n")


@pytest.mark.parametrize("tool", [check_table, operator_table], ids=lambda tool: tool.__name__)
def test_a_document_has_the_section_of_today(tool: ModuleType) -> None:
    assert tool.DOCUMENT.read_text() == tool.written(tool.DOCUMENT.read_text()), "stale: run `make docs`"


def test_the_page_of_the_commands_is_what_they_say() -> None:
    assert command_reference.DOCUMENT.read_text() == command_reference.page(), "stale: run `make docs`"


def test_the_reference_of_the_site_has_the_options_of_every_command() -> None:
    text = command_reference.reference()
    for heading in ("## exportkit export\n", "## exportkit ops\n", "## exportkit ops check\n"):
        assert text.count(heading) == 1
    assert "--dynamic PARAM:DIM=SIZE" in text
    assert "--help " not in text.partition("## exportkit export")[2]


def test_every_check_says_in_a_sentence_what_it_promises() -> None:
    rows = [line.split(" | ") for line in check_table.check_table().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in checks()]
    assert all(row[1].removesuffix(" |").endswith(".") for row in rows)


def test_every_operator_is_named_and_no_cell_is_cut_by_a_bar() -> None:
    table = operator_table.operator_table()
    for name in SPECS:
        assert f"**{name}**" in table or f"`{name}`" in table
    rows = [line.replace(r"\|", "") for line in table.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {4}
