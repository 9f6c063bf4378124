"""A step that takes long says so again."""

from __future__ import annotations

import threading

import pytest

from exportkit.cli import output


def test_a_long_step_is_reported_again_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    again = threading.Event()

    def echo(text: str, *, err: bool) -> None:
        assert err
        said.append(text)
        if len(said) > 1:
            again.set()

    monkeypatch.setattr(output, "_LONG", 0.01)
    monkeypatch.setattr("exportkit.cli.output.click.echo", echo)
    with output.progress() as step:
        step("tracing")
        assert again.wait(60)
    assert said[0] == "tracing ..."
    assert said[1].startswith("tracing, for 0 s")
