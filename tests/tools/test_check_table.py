from exportkit.operators.contract.definition import checks
from tools.check_table import DOCUMENT, check_table, written


def test_the_document_has_the_checks_of_today():
    assert DOCUMENT.read_text() == written(DOCUMENT.read_text()), "stale: run `make docs`"


def test_every_check_says_in_a_sentence_what_it_promises():
    rows = [line.split(" | ") for line in check_table().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| `{name}`" for name in checks()]
    assert all(row[1].removesuffix(" |").endswith(".") for row in rows)
