"""Errors that are injected in models, in packages, or in what runs them, are seen, each for what it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolve import resolve
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from exportkit.runtime.model import Model
from exportkit.runtime.session import Session
from exportkit.runtime.state import LocalState
from exportkit.verify.options import VerifyOptions
from exportkit.verify.outcomes import Mismatch, SessionsAgree, Verdict
from exportkit.verify.verify import verify
from tests.artifacts import artifact
from tests.verify.state_models import MODELS
from tests.verify.told_worker import replayed_here
from tools.injected_errors import DOCUMENT, DTYPES, INJECTED, INJECTED_STATE, Injected, judged


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("injected", INJECTED, ids=lambda injected: injected.what)
def test_it_is_judged_as_the_document_says(injected: Injected, dtype: torch.dtype) -> None:
    agrees = judged(injected, dtype).agrees
    if injected.gross is not False:
        assert agrees is (injected.gross is None)
    row = re.search(rf"^\| {re.escape(injected.what)} \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert row
    said = row[1].split(" | ")[DTYPES.index(dtype)]
    assert said.startswith("passes" if agrees else "**seen**")


# --- state -----------------------------------------------------------------------------------------------------------


FOLDER = Path(__file__).parent
CASES = VerifyOptions(against="cases")
PROMISES = 5


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with replayed_here():
        yield


def failures(path: Path) -> list[Verdict]:
    return [check.verdict for check in verify(path, CASES).checks if check.failed]


# --- in the package ---------------------------------------------------------------------------------------------------


def wrong(kind: str, folder: Path) -> Path:
    """A package of a wrong model, with the cases that the right one recorded."""
    resolved = resolve(f"{FOLDER / 'state_models.py'}:decoder", model_kwargs={"kind": kind})
    path = folder / f"{kind}.pt2"
    export_program(resolved, path, TraceOptions(cases=1))
    return rewritten(path, path, lambda manifest, records: manifest, cases_of=artifact("decoder-program"))


def rewritten(
    path: Path, out: Path, change: Callable[[m.Manifest, dict[str, Any]], m.Manifest], *, cases_of: Path | None = None
) -> Path:
    """The package with another manifest and other records."""
    with PackageReader(path) as reader, PackageReader(cases_of or path) as recorded:
        dropped = {case.record for case in reader.manifest.cases}
        records = {each.name: reader.read(each.name) for each in reader.manifest.records if each.name not in dropped}
        records |= {case.record: recorded.read(case.record) for case in recorded.manifest.cases}
        changed = msgspec.structs.replace(reader.manifest, cases=recorded.manifest.cases)
    write_package(out, change(changed, records), records)
    return out


def swapped(manifest: m.Manifest, records: dict[str, Any]) -> m.Manifest:
    """Decoding takes the keys of one layer for those of the other."""
    names = [each.name for each in manifest.state]
    one, other = names.index("keys_0"), names.index("keys_1")
    exchanged = {one: other, other: one}
    methods = []
    for method in manifest.methods:
        uses = (msgspec.structs.replace(use, index=exchanged.get(use.index, use.index)) for use in method.state)
        methods.append(msgspec.structs.replace(method, state=tuple(uses)) if method.name == "decode" else method)
    return msgspec.structs.replace(manifest, methods=tuple(methods))


def other_begin(manifest: m.Manifest, records: dict[str, Any]) -> m.Manifest:
    """A session begins with another bias."""
    bias = next(each for each in manifest.state if each.name == "bias")
    assert bias.initial is not None
    values = torch.frombuffer(bytearray(records.pop(bias.initial)), dtype=torch.float32) + 0.01
    content = values.numpy().tobytes()
    name = f"exportkit/state/{hashlib.sha256(content).hexdigest()}"
    records[name] = content
    state = tuple(msgspec.structs.replace(each, initial=name) if each is bias else each for each in manifest.state)
    return msgspec.structs.replace(manifest, state=state)


def test_the_right_package_passes() -> None:
    assert failures(artifact("decoder-program")) == []


def test_a_dropped_write_is_seen_in_the_state_and_in_later_calls(tmp_path: Path) -> None:
    (*_, verdict) = failures(wrong("Stale", tmp_path))
    assert isinstance(verdict, Mismatch)
    assert "state values_1: less accurate than eager" in verdict.message
    assert "call 0" not in verdict.message
    assert "call 2: 0: less accurate than eager" in verdict.message
    assert "state keys_0" not in verdict.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "seen", "unseen"),
    [
        ("OffByOne", "state position: 1 of 1 elements differ", "call 1"),
        ("Unheard", "call 1: written.heard", "state"),
        (swapped, "call 1: 0: less accurate than eager", "call 0"),
        (other_begin, "call 0: 0: less accurate than eager", "state position"),
    ],
)
def test_an_error_of_a_model_or_a_manifest_is_seen(error: Any, seen: str, unseen: str, tmp_path: Path) -> None:
    right = artifact("decoder-program")
    path = wrong(error, tmp_path) if error in MODELS else rewritten(right, tmp_path / "wrong.pt2", error)
    (*_, verdict) = failures(path)
    assert isinstance(verdict, Mismatch)
    assert seen in verdict.message
    assert unseen not in verdict.message


# --- in what runs it --------------------------------------------------------------------------------------------------


def one_session_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Session] = []
    session = Model.session

    def shared(self: Model, **sizes: int) -> Session:
        made.append(session(self, **sizes))
        made[-1]._state = made[0]._state
        return made[-1]

    monkeypatch.setattr(Model, "session", shared)
    monkeypatch.setattr(LocalState, "close", lambda self: None)


def no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalState, "fork", lambda self: LocalState(self._code, self._plan, self.use()))


def a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(self: LocalState) -> LocalState:
        tensors = [torch.empty_like(tensor) for tensor in self.use()]
        self._plan.initialise(tensors)
        return LocalState(self._code, self._plan, tensors)

    monkeypatch.setattr(LocalState, "fork", fork)


def forgets_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(self: LocalState) -> None:
        before = self.tensors()["gain"].clone()
        self._plan.initialise(self.use())
        self.tensors()["gain"].copy_(before)

    monkeypatch.setattr(LocalState, "reset", reset)


def loads_all_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    replace = LocalState.replace
    monkeypatch.setattr(
        LocalState,
        "replace",
        lambda self, tensors, *row: replace(self, {**tensors, "calls": self.tensors()["calls"]}, *row),
    )


INJECTORS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "state shared by two sessions": (one_session_for_all, "shared_state", "call 0 (forward): 0"),
    "a fork that does not copy": (no_copy, "fork_shares_state", "First difference"),
    "a fork that begins again": (a_new_one, "fork_without_state", "First difference"),
    "a reset that forgets one tensor": (forgets_the_gain, "reset_incomplete", "state gain"),
    "a loaded state that lacks one tensor": (loads_all_but_one, "saved_state_differs", "First difference"),
}


def test_sessions_that_keep_their_promises_pass() -> None:
    sessions = [check.verdict for check in verify(artifact("counter"), CASES).checks if check.against == "sessions"]
    assert [type(verdict) for verdict in sessions] == [SessionsAgree] * PROMISES
    assert all("equal bits" in verdict.message for verdict in sessions)


@pytest.mark.parametrize("since", ["checking two sessions in turns", "checking fork", "checking reset"])
def test_code_whose_bits_vary_is_judged_whenever_that_begins(since: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    save = safetensors.torch.save_file

    def varied(tensors: dict[str, torch.Tensor], file: str) -> None:
        begun = any(each.startswith(since) for each in said)
        answers = {name: each for name, each in tensors.items() if ".output." in name and each.is_floating_point()}
        save(tensors | {name: each.nextafter(2 * each) for name, each in answers.items() if begun}, file)

    monkeypatch.setattr(safetensors.torch, "save_file", varied)
    checks = verify(artifact("counter"), CASES, progress=said.append).checks
    sessions = [check.verdict for check in checks if check.against == "sessions"]
    assert [type(verdict) for verdict in sessions] == [SessionsAgree] * PROMISES
    assert "bits that the code does not repeat" in sessions[-1].message


@pytest.mark.parametrize("what", INJECTORS)
def test_a_broken_promise_is_seen_for_what_it_is(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind, where = INJECTORS[what]
    plant(monkeypatch)
    verdict = next(verdict for verdict in failures(artifact("counter")) if verdict.kind == kind)
    assert where in verdict.message
    assert verdict.exit_code == 19


def test_the_document_lists_what_is_injected_here() -> None:
    text = DOCUMENT.read_text()
    for injected in INJECTED_STATE:
        assert re.search(
            rf"^\| {re.escape(injected.what)} \|.*\| {re.escape(injected.seen_as)} \|$", text, re.MULTILINE
        )
    assert {injected.what for injected in INJECTED_STATE if injected.seen_as != Mismatch.kind} == set(INJECTORS)
    assert all(INJECTORS[p.what][1] == p.seen_as for p in INJECTED_STATE if p.what in INJECTORS)
