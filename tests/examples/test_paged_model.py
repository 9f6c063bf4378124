"""The models of examples/paged_cache, from export to sessions: operators that write state, and inputs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import exportkit
from exportkit.errors import ModelRunError, SessionBrokenError
from tests.examples import example_packages
from tests.operators.scaffold.scaffolded import imported


@pytest.fixture
def models(on_path: Path) -> ModuleType:
    """paged_model.py"""
    return imported("example_paged_model", on_path / "paged_model.py")


def on(device: torch.device, arguments):
    return [argument.to(device) for argument in arguments]


@pytest.mark.parametrize(("batch", "tokens", "seed"), [(1, 9, 0), (3, 40, 1), (6, 96, 2)])
def test_a_session_does_what_eager_does(models, device, batch: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    calls = models.draw_sequence({"batch": batch, "tokens": tokens}, generator)
    module = models.spec().model.to(device)
    with exportkit.load(example_packages.made("paged", device.type), str(device)) as model, torch.no_grad():
        session, other = model.session(), model.session()
        for method, args, _ in calls:
            answer, expected = getattr(session, method)(*on(device, args)), getattr(module, method)(*on(device, args))
            torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
        for name in ("kc", "vc"):
            torch.testing.assert_close(session.state[name], getattr(module, name), rtol=1e-5, atol=1e-6)
            assert not other.state[name].any()


def test_a_slot_beyond_the_cache_breaks_the_session_until_it_is_reset(models) -> None:
    (_, (x, slots), _), *_ = models.draw_sequence({"batch": 2, "tokens": 5}, torch.Generator().manual_seed(0))
    bad = slots.clone()
    bad[0] = models.BLOCKS * models.SIZE
    with exportkit.load(example_packages.made("paged")) as model, model.session() as session:
        with pytest.raises(ModelRunError):
            session.fill(x, bad)
        with pytest.raises(SessionBrokenError):
            session.fill(x, slots)
        session.reset()
        assert int(session.fill(x, slots)["count"]) == int((slots >= 0).sum())


def test_caches_of_the_caller_are_written_where_they_are(models, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    args, _ = models.draw_written({"batch": 2, "blocks": 12}, generator)
    args = on(device, args)
    theirs = [argument.clone() for argument in args]
    module = models.written().model.to(device)
    with exportkit.load(example_packages.made("paged-written", device.type), str(device)) as model, torch.no_grad():
        places = [cache.data_ptr() for cache in args[-2:]]
        torch.testing.assert_close(model(*args), module(*theirs), rtol=1e-4, atol=1e-5)
        assert [cache.data_ptr() for cache in args[-2:]] == places
        for ours, expected in zip(args[-2:], theirs[-2:]):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
