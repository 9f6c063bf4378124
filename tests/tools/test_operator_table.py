from exportkit.arr_coc.ops import SPECS
from tools.operator_table import DOCUMENT, operator_table, written


def test_the_document_has_the_operators_of_today():
    assert DOCUMENT.read_text() == written(DOCUMENT.read_text()), "stale: run `make docs`"


def test_every_operator_is_named_and_no_cell_is_cut_by_a_bar():
    table = operator_table()
    for name in SPECS:
        assert f"**{name}**" in table or f"`{name}`" in table
    rows = [line.replace(r"\|", "") for line in table.splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {4}
