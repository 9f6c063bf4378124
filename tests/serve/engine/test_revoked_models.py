"""A server obeys the revocation lists of this machine's policies when it loads a model again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exportkit.package.archive import PackageReader
from exportkit.package.revocation import revoke
from exportkit.serve.statuses import BackendError
from tests.package.signers import write_policy
from tests.serve.engine.asking import serving


async def test_a_model_that_is_revoked_is_unloaded_when_it_is_loaded_again(rows_package, tmp_path, monkeypatch):
    package = Path(shutil.copy(rows_package, tmp_path / "rows.pt2"))
    lists = [{"list": "revoked.json", "minimum_sequence": 1}]
    policy = write_policy(tmp_path / "policy.json", require_signature=False, revocations=lists)
    revoke(tmp_path / "revoked.json", {}, {})
    monkeypatch.setenv("EXPORTKIT_POLICY", str(policy))
    async with serving(package, warm_up=False) as repository:
        with PackageReader(package) as reader:
            digest = reader.manifest_sha256
        policy.chmod(0o666)
        with pytest.raises(BackendError, match="may be written to by other users"):
            await repository.load("rows", {})
        assert repository.ready  # what runs goes on: a bad policy says nothing of this model
        policy.chmod(0o644)
        revoke(tmp_path / "revoked.json", {}, {digest: "wrong weights"})
        with pytest.raises(BackendError, match=r"revoked by .*wrong weights"):
            await repository.load("rows", {})
        (entry,) = repository.index()
        assert entry.state == "UNAVAILABLE"
        assert "wrong weights" in entry.reason
        with pytest.raises(BackendError, match="revoked by"):
            await repository.load("rows", {})
