"""exportkit-run and what it keeps in the cache: it hashes what Python would hash, and honours what Python verified."""

from __future__ import annotations

import time

import exportkit
from tests.runtime import exportkit_run


def test_what_it_verified_is_not_hashed_again_unless_that_is_asked_for(meeting_package, tmp_path):
    """A file that is hashed has another record afterwards, written under another name and renamed."""
    time.sleep(max(0.0, meeting_package.stat().st_ctime + 2.1 - time.time()))  # until its times can be relied on

    def records() -> dict[str, int]:
        found = [*tmp_path.rglob("~verified.json"), *tmp_path.rglob("packages/*.json")]
        return {str(path): path.stat().st_ino for path in found}

    exportkit_run.load(meeting_package)
    first = records()
    assert len(first) == 3, "of the package, its library and its target"
    exportkit_run.load(meeting_package)
    exportkit_run.load(meeting_package, "--verify", "once")
    exportkit.load(meeting_package).close()
    assert records() == first
    exportkit_run.load(meeting_package, "--verify", "always")
    assert records().keys() == first.keys()
    assert not records().items() & first.items()
