"""The state of sequences in blocks: rows are nobody else's while somebody has them, and empty blocks go."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import exportkit
from exportkit.serve.engine.state_rows import StateRows
from tests.serve.engine import ticker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[exportkit.Model]:
    with exportkit.load(ticker.write(tmp_path_factory.mktemp("rows") / "ticker.pt2")) as model:
        yield model


def test_sessions_in_blocks_answer_as_sessions_by_themselves(model: exportkit.Model):
    rows, chance = StateRows(model, "batch"), random.Random(1)
    opened: list[tuple[exportkit.Session, exportkit.Session, object]] = []
    for step in range(600):
        count = chance.choice([1, 1, 1, 2, 3, 16])
        session, place = rows.open({"batch": count})
        assert place is not None
        opened.append((session, model.session(batch=count), place))
        for each, alone, _ in chance.sample(opened, min(len(opened), 5)):
            given = ticker.inputs(step, each.sizes["batch"])
            assert torch.equal(each(*given.values()), alone(*given.values()))
        del place
        if chance.random() < 0.8:
            opened.pop(chance.randrange(len(opened)))
    assert 1 <= len(rows._blocks) <= 6
    opened.clear()
    del session, each
    held = [rows.open({"batch": 16}) for _ in range(33)]  # more than two blocks
    assert len(rows._blocks) == 3
    starts = {(id(place.block), place.start) for _, place in held if place}
    assert len(starts) == 33


def test_rows_begin_with_the_values_of_a_new_session(model: exportkit.Model):
    rows = StateRows(model, "batch")
    session, place = rows.open({"batch": 2})
    session(*ticker.inputs(1, 2).values())
    assert session.state["memory"].any()
    session.close()
    del session, place
    again, place = rows.open({"batch": 2})
    assert place is not None
    assert place.start == 0
    assert not again.state["memory"].any()
