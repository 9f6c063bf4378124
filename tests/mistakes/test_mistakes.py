"""Each mistake that people make is said with its cause and with advice, and the advice, typed as it is, works."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exportkit.package.signing import sign_package
from tests.artifacts import artifact
from tests.commands import run
from tests.fixtures import stable_library
from tests.mistakes.mistakes_table import Mistake, mistakes
from tests.package.signers import package, signer
from tests.subprocesses import commands

HERE = Path(__file__).parent
VERIFY = HERE.parent / "verify"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, libraries, weights and keys."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(HERE / "mistaken_models.py", folder / "models.py")
    faked = (HERE / "mistaken_operators.py").read_text()
    (folder / "faked.py").write_text(faked)
    start, _, rest = faked.partition("@torch.library.register_fake")
    (folder / "calls.py").write_text(start + "class Net" + rest.partition("class Net")[2])
    shutil.copy(stable_library.build(VERIFY / "misbehaving.cpp"), folder)
    shutil.copy(stable_library.build(VERIFY / "doubling.cpp", None, "-DFACTOR=2"), folder)
    linear = torch.nn.Linear(8, 6).state_dict()
    both = torch.rand(54)  # which weights share, as tied ones do
    torch.save({"model": {"linear.weight": both[:48].view(6, 8), "linear.bias": both[48:]}}, folder / "saved.pt")
    torch.jit.script(torch.nn.Linear(8, 6)).save(folder / "script.pt")
    save_file({f"model.linear.{name}": tensor for name, tensor in linear.items()}, folder / "prefixed.safetensors")
    save_file({"linear.weight": torch.rand(6, 9), "linear.bias": torch.rand(6)}, folder / "wide.safetensors")
    release = signer(folder)
    signer(folder, "other")
    package(folder, "unsigned.pt2")
    sign_package(package(folder, "signed.pt2"), release.key)
    shutil.copy(artifact("weighted"), folder / "weighted.pt2")
    return folder


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    """A folder with exportkit and python, whose processes begin quickly."""
    with commands("exportkit", "python") as folder:
        yield folder


_FOLLOWED: dict[str, tuple[int, str]] = {}  # by line: many mistakes have one right form


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * each.slow) for each in mistakes()]
)
def test_a_mistake_is_said_and_the_advice_works(
    mistake: Mistake, project: Path, programs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    with monkeypatch.context() as patched:
        for name, value in mistake.settings.items():
            patched.setenv(name, value)
        code, said = _typed(mistake.typed, programs if mistake.fresh else None, capsys)
    assert code == mistake.code, said
    assert not [text for text in mistake.says if text not in said], said
    assert not [text for text in mistake.never if text in said], said
    for line in mistake.lines_by_advice(said):
        if line not in _FOLLOWED:
            fresh = mistake.fresh or not line.startswith("exportkit ")
            _FOLLOWED[line] = _typed(line, programs if fresh else None, capsys)
        assert _FOLLOWED[line][0] == 0, f"{line}\n{_FOLLOWED[line][1]}"


def _typed(line: str, programs: Path | None, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Types a line into a shell, or runs it in this process. Returns the exit code and all that is said."""
    if programs is None:
        code, out, err = run(capsys, *shlex.split(line)[1:])
        return code, out + err
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_there_are_fifty_of_them_and_most_advice_can_be_followed() -> None:
    table = mistakes()
    assert len(table) >= 50
    assert len({mistake.typed for mistake in table}) == len(table)
    assert sum(mistake.then is not None for mistake in table) >= 30
