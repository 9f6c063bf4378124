"""FORMAT.md is read by these tests: what it says is what the code does."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from exportkit import package
from exportkit.onnx.files import SIDECAR_SUFFIX
from exportkit.package import core, manifest, openssf, revocation, signature
from exportkit.package.archive import ROOT, PackageReader, write_package
from exportkit.package.consistency import AOTINDUCTOR_DIR, CASES_DIR, OPERATORS_DIR, STATE_DIR, is_complete
from exportkit.package.manifest import FORMAT_VERSION, MANIFEST_NAME, Strict, decode_manifest, encode_manifest
from exportkit.package.signing import sign_package
from exportkit.package.structure import MAX_DEPTH
from exportkit.package.trust import demand
from tests.adversarial.forge import STOCK_RECORDS
from tests.package import samples
from tests.package.signers import signer

TEXT = Path(package.__file__).with_name("FORMAT.md").read_text()
STRUCTS = {
    name: value
    for module in (manifest, signature, revocation)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Strict) and value is not Strict
}


def table(name: str) -> dict[str, tuple[str, str]]:
    """The rows under a struct's heading: key to type and reason."""
    section = re.search(rf"^### `{name}`\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section, f"FORMAT.md has no section `{name}`"
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|(.*)\|$", section[1], re.MULTILINE)
    return {key: (kind, why.strip()) for key, kind, why in rows}


def example(section: str = "Example") -> bytes:
    block = re.search(rf"^## {section}\n.*?^```json\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert block
    return block[1].encode()


@pytest.mark.parametrize("name", STRUCTS)
def test_the_key_table_has_the_keys_of_the_code_in_order(name: str) -> None:
    struct = STRUCTS[name]
    tag = struct.__struct_config__.tag
    assert list(table(name)) == (["type"] if tag else []) + list(struct.__struct_encode_fields__)
    if tag:
        assert table(name)["type"][0] == f'`"{tag}"`'


def test_every_table_is_of_a_struct_of_the_code() -> None:
    assert set(re.findall(r"^### `(\w+)`$", TEXT, re.MULTILINE)) == STRUCTS.keys() | {"Policy", "NamedList"}


@pytest.mark.parametrize("name", STRUCTS)
def test_types_say_whether_null_is_allowed_and_what_is_a_list(name: str) -> None:
    schema = msgspec.json.schema(STRUCTS[name])
    properties = schema.get("$defs", {}).get(name, schema)["properties"]
    for key, (kind, _) in table(name).items():
        said = properties[key]
        if key == "type":
            continue
        types = {option.get("type") for option in said.get("anyOf", [said])} | {said.get("type")}
        nullable = "null" in types or None in said.get("enum", [])
        inside = kind.startswith(("list of", "object"))  # a null among those is the items'
        assert ("null" in kind and not inside) == nullable, (name, key)
        assert ("list of" in kind) == ("array" in types), (name, key)
        assert ("object" in kind) == ("object" in types), (name, key)


def test_the_example_is_a_manifest_and_packs_to_itself(tmp_path: Path) -> None:
    decoded = decode_manifest(example())
    assert is_complete(decoded)
    assert encode_manifest(decoded) == example()
    assert write_package(tmp_path / "example.pt2", decoded, samples.RECORDS) == decoded
    with PackageReader(tmp_path / "example.pt2") as reader:
        reader.verify()


def constant(file: str, name: str) -> int:
    """A number of the library's source."""
    text = Path(__file__).parents[2].joinpath("csrc", "package", file).read_text()
    found = re.search(rf"\b{name} = ([^;]+);", text)
    assert found, name
    number, _, shift = re.sub(r"size_t|uint64_t|[{}']", "", found[1]).partition(" << ")
    return int(number) << int(shift or 0)


def test_numbers_and_names_in_the_text_are_those_of_the_code() -> None:
    prose = " ".join(TEXT.split())
    for said in (
        f"version {FORMAT_VERSION}",
        f"`format_version` is {FORMAT_VERSION}",
        f"at most {constant('container.h', 'kMaxDirectoryBytes') >> 20} MiB",
        f"at most {constant('manifest.h', 'kMaxManifestBytes') >> 20} MiB",
        f"at most {constant('reader.cpp', 'kMaxNameLength')} characters",
        f"at most {constant('manifest.h', 'kMaxManifestDepth')} brackets deep",
        f"at most {MAX_DEPTH} deep",
        f"at most {constant('json.h', 'kMaxJsonValues') // 10**6} million values",
        f"One for each dimension, at most {constant('manifest_checks.h', 'kMaxRank')};",
        f"{ROOT}/ the archive's one root folder",
        f"at most {constant('guarded.h', 'kSmallFileBytes') >> 10} KiB",
        f"at most {constant('trust.cpp', 'kMaxListBytes') >> 20} MiB, under the rules",
        f"at most {constant('trust.cpp', 'kMaxReasonBytes')} bytes",
        f"nested at most {constant('signature.cpp', 'kMaxDepth')} brackets deep",
        f"that the model uses, {constant('manifest.h', 'kMinOpset')} to {constant('manifest.h', 'kMaxOpset')}.",
        f"`model.onnx{SIDECAR_SUFFIX}{signature.SUFFIX}`",
        f"`model.pt2{signature.SUFFIX}` beside",
        f"`model.pt2{openssf.SUFFIX}`",
        f"nested at most {constant('signature.cpp', 'kBundleDepth')} brackets deep",
        f"{len(signature.statement('0' * 64, '0' * 64))} bytes in all",
        f"at most {constant('accuracy.h', 'kErrorFactor')} times eager's, plus "
        f"{constant('accuracy.h', 'kOutputUlps')} unit in the last place of its dtype, plus "
        f"{constant('accuracy.h', 'kFloat32Ulps')} of float32",
        "`/etc/exportkit/policy.json`",
        f"with which it is called. At most {constant('state_checks.cpp', 'kMaxMethodName')} characters.",
        f"At most {constant('manifest_checks.h', 'kMaxRank')}. Only the first may be a Size",
        *(MANIFEST_NAME, AOTINDUCTOR_DIR, OPERATORS_DIR, CASES_DIR, STATE_DIR),
    ):
        assert said in prose, said
    for name, content in STOCK_RECORDS.items():
        assert name in prose
        assert f"`{content.decode()}`".replace("\n", "\\n") in prose


def test_the_words_that_are_no_names_are_those_of_the_text() -> None:
    listed = re.search(r"and none of `([^`]+)`", " ".join(TEXT.split()))
    assert listed
    is_name = core.library().ek_is_name
    assert not any(is_name(word.encode()) for word in listed[1].split())
    assert len(listed[1].split()) == 35
    assert all(is_name(word.encode()) for word in ("match", "type", "case", "_", "print", "nope"))


def test_what_is_signed_is_what_the_text_shows() -> None:
    shown = re.search(r"^    (exportkit package signature .*?)\n\n", TEXT, re.MULTILINE | re.DOTALL)
    assert shown
    lines = [line.strip().partition("<")[0] for line in shown[1].splitlines()]
    digests = ["", "a" * 64, "b" * 64]
    said = "".join(f"{line}{digest}\n" for line, digest in zip(lines, digests))
    assert signature.statement("a" * 64, "b" * 64) == said.encode()


def test_the_example_of_a_signature_file_is_of_the_example_package(tmp_path: Path) -> None:
    """Checked without the code under test: the key is the RFC's, the package is written anew."""
    (tmp_path / "example.pt2.sig").write_bytes(example("Signatures"))
    decoded = signature.read_signatures(tmp_path / "example.pt2.sig")
    assert decoded is not None
    assert signature.encode_signatures(decoded) == example("Signatures")
    path = tmp_path / "example.pt2"
    write_package(path, decode_manifest(example()), samples.RECORDS)
    file_sha256, manifest_sha256 = hashlib.sha256(path.read_bytes()).hexdigest(), hashlib.sha256(example()).hexdigest()
    assert (decoded.file_sha256, decoded.manifest_sha256) == (file_sha256, manifest_sha256)
    raw = re.search(r"public half is `([0-9a-f]{64})`", TEXT)
    assert raw
    key = bytes.fromhex(raw[1])
    (only,) = decoded.signatures
    assert only.key_id == hashlib.sha256(key).hexdigest()
    lines = f"exportkit package signature 1\nmanifest-sha256 {manifest_sha256}\nfile-sha256 {file_sha256}\n"
    Ed25519PublicKey.from_public_bytes(key).verify(base64.b64decode(only.signature), lines.encode())


def test_a_bundle_has_what_the_text_says_of_bundles(tmp_path: Path) -> None:
    bundle = json.loads(openssf.sign("model.pt2", "1" * 64, signer(tmp_path, curve=ec.SECP256R1()).key))
    parts = {"bundle": bundle, "statement": json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))}
    rows = re.findall(r"^\| (bundle|statement) \| `([^`]+)` \| (.*) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 9
    for part, path, said in rows:
        value = functools.reduce(lambda inner, key: inner[key], path.split("."), parts[part])
        if said.startswith('`"'):
            assert json.loads(said.strip("`")) == value
        elif said.startswith("One object"):
            assert len(value) == 1
            assert set(re.findall(r"`(\w+)`", said)) <= value[0].keys()
    assert parts["statement"]["predicate"]["resources"] == [{"name": ".", "algorithm": "sha256", "digest": "1" * 64}]


def test_the_example_of_a_policy_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(table("Policy")) == list(json.loads(example("Policies")))
    assert list(table("NamedList")) == list(json.loads(example("Policies"))["revocations"][0])
    key = signer(tmp_path)
    revocation.revoke(tmp_path / "revoked.json", {}, {})
    (tmp_path / "policy.json").write_bytes(example("Policies"))
    monkeypatch.setenv("EXPORTKIT_POLICY", str(tmp_path / "policy.json"))
    write_package(tmp_path / "example.pt2", decode_manifest(example()), samples.RECORDS)
    sign_package(tmp_path / "example.pt2", key.key)
    with PackageReader(tmp_path / "example.pt2", demand=demand()) as reader:
        (found,) = reader.signers
    assert found.source == str(key.public)
