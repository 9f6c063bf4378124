"""The SBOM of a package says what its manifest says, in a form that SPDX's own library accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exportkit.package.archive import PackageReader
from exportkit.package.sbom import package_sbom
from exportkit.spdx import Component, document
from tests.commands import run
from tests.package.signers import package, signer

GOLDEN = Path(__file__).parents[1] / "golden"


def assert_valid(content: bytes, folder: Path) -> Any:
    """What SPDX's library reads, after it found nothing wrong."""
    anything = pytest.importorskip("spdx_tools.spdx.parser.parse_anything")
    validation = pytest.importorskip("spdx_tools.spdx.validation.document_validator")
    file = folder / "sbom.spdx.json"
    file.write_bytes(content)
    parsed = anything.parse_file(str(file))
    assert [str(message) for message in validation.validate_full_spdx_document(parsed)] == []
    return parsed


@pytest.mark.parametrize("name", ["format-1-cpu.pt2", "state-1-cpu.pt2"])
def test_it_has_every_library_with_its_digest_and_is_valid(name: str, tmp_path: Path) -> None:
    with PackageReader(GOLDEN / name) as reader:
        content, manifest, sha256 = package_sbom(reader), reader.manifest, reader.sha256
    parts = json.loads(content)["packages"]
    digests = {part["checksums"][0]["checksumValue"] for part in parts if "checksums" in part}
    code = {record.sha256 for record in manifest.records if record.name.endswith(".so")}
    assert code
    assert digests == code | {sha256}
    made = {(part["name"], part.get("versionInfo")) for part in parts}
    assert {("exportkit", manifest.provenance.exportkit), ("torch", manifest.provenance.torch)} <= made
    parsed = assert_valid(content, tmp_path)
    assert len(parsed.packages) == len(parts)


def test_the_command_writes_the_same_document_for_the_same_package(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    path, file = package(tmp_path), tmp_path / "model.spdx.json"
    assert run(capsys, "inspect", path, "--sbom", file)[:2] == (0, f"{file}: a bill of materials\n")
    written = file.read_bytes()
    assert json.loads(written)["creationInfo"]["created"] == "2001-09-09T01:46:40Z"
    assert run(capsys, "inspect", path, "--sbom", file, "--json")[0] == 0
    assert file.read_bytes() == written
    content = bytearray(path.read_bytes())
    with PackageReader(path) as reader:
        content[reader.data_offset(next(name for name in reader.names if name.endswith(".so")))] ^= 1
    path.write_bytes(content)
    file.unlink()
    assert run(capsys, "inspect", path, "--sbom", file)[0] == 3
    unsigned, keys = package(tmp_path, "other.pt2"), ("--public-key", signer(tmp_path).public)
    assert run(capsys, "inspect", unsigned, "--sbom", file, *keys)[0] == 3
    assert not file.exists()


def test_names_that_no_address_or_number_has_are_escaped(tmp_path: Path) -> None:
    whole = Component("a model/näme", "1 +x", file="m.pt2", purpose="OTHER")
    parts = [Component("Torch_x", "2.13.0+cpu", pypi=True, relation="BUILD_TOOL_OF"), Component('"<\n>', comment="é")]
    content = document(whole, parts, tool="exportkit-0", identity="x y")
    assert b"pkg:pypi/torch-x@2.13.0%2Bcpu" in content
    assert_valid(content, tmp_path)
