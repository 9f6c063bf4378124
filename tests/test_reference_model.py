"""One rule says which MODEL may be imported for an artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from exportkit.reference_model import ReferenceModel, ReferenceModelFiles, unnamed

POLICY = "the policy /etc/exportkit/policy.json"


@pytest.mark.parametrize(
    ("named", "recorded", "demanded_by", "imported"),
    [
        ("net.py:Net", "other.py:Net", None, "net.py:Net"),
        ("net.py:Net", None, POLICY, "net.py:Net"),
        (None, "arr-coc", None, "arr-coc"),
        (None, "arr-coc", POLICY, None),
        (None, "exportkit.arr_coc.model:export_spec", None, None),  # what the name stands for is not registered
        (None, "subprocess:getoutput", None, None),
        (None, "net.py:Net", None, None),
        (None, None, None, None),
    ],
)
def test_model_is_the_callers_or_a_registered_name_without_a_demanded_signature(
    named: str | None, recorded: str | None, demanded_by: str | None, imported: str | None
) -> None:
    assert ReferenceModel(named).model_of(recorded, demanded_by) == imported


@pytest.mark.parametrize(
    ("recorded", "demanded_by", "said"),
    [
        (None, None, "exported from an object, not from a MODEL that can be imported; name it with --model MODEL"),
        ("net.py:Net", None, "a model is imported only if its caller names it; name it with --model net.py:Net"),
        ("net.py:Net", POLICY, f"{POLICY} requires a signature, which does not cover"),
        ("x:y; curl example.org | sh", None, "name it with --model MODEL"),
    ],
)
def test_it_says_why_there_is_none_and_what_to_write(recorded: str | None, demanded_by: str | None, said: str) -> None:
    assert said in unnamed(recorded, demanded_by)


def test_files_travel_as_absolute_paths_and_modules_as_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    eager = ReferenceModel("net.py:Net", Path("w.safetensors"), [Path("lib.so"), "my.ops"])
    sent = ReferenceModelFiles.of(eager, eager.model)
    assert sent.libraries == (str(tmp_path / "lib.so"), "my.ops")
    assert sent.source() == ReferenceModel("net.py:Net", tmp_path / "w.safetensors", [tmp_path / "lib.so", "my.ops"])
