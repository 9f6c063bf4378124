"""The provenance of an artifact."""

from __future__ import annotations

import os
import subprocess

import torch

from exportkit import __version__
from exportkit.package.manifest import Provenance


def provenance(*, tf32: bool = False) -> Provenance:
    """Returns the versions of exportkit and torch, the commit of the working directory, and whether eager used TF32."""
    commit = _git("rev-parse", "HEAD")
    dirty = bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else None
    return Provenance(exportkit=__version__, torch=str(torch.__version__), commit=commit, dirty=dirty, tf32=tf32)


def _git(*args: str) -> str | None:
    try:
        unlocked = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False, env=unlocked)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
