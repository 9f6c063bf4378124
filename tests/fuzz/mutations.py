"""Changes that random bytes would hardly ever make: those after which lengths, digests and checksums still fit.

Without them nearly every input would end at the first checksum.
"""

from __future__ import annotations

import base64
import json
import random
import struct
from collections.abc import Callable
from typing import Any

from exportkit.package import openssf
from exportkit.package.archive import ROOT
from exportkit.package.container import read_directory
from exportkit.package.manifest import MANIFEST_NAME
from tests.adversarial.forge import archive, document, full, listing, package, records
from tests.fuzz import promises
from tests.package import samples

Bytes = Callable[[bytes], bytes]

_NUMBERS = [
    0,
    -1,
    1,
    2,
    31,
    32,
    33,
    2**31,
    2**32 - 1,
    2**32,
    2**53 + 1,
    2**62,
    2**62 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
]
_TEXTS = [
    *(
        "",
        "a",
        ".",
        "..",
        "../x",
        "/",
        "a/b",
        "\0",
        "\n",
        "\x1b[2J",
        "\u202e",
        "\ud800",
        "é",
        "batch",
        "scores",
        "image",
    ),
    *("cpu", "cuda", "any", "float32", "0" * 64, "2.13", "linux-x86_64", "toy::twice", "class", "_x", "x" * 600),
]
_HEADER_FIELDS = [
    (4, "<H"),
    (8, "<H"),
    (10, "<H"),
    (12, "<H"),
    (16, "<I"),
    (20, "<I"),
    (24, "<I"),
    (28, "<H"),
    (30, "<H"),
]


def manifests() -> list[bytes]:
    """To start from: the sample, and one in which every kind of thing is there."""
    rich = document()
    call = rich["call"]
    leaves = [{"type": "tensor", "index": index} for index in range(3)]
    constants = [{"type": "constant", "value": value} for value in (None, True, 7, 0.5, "done")]
    call["result"] = {
        "type": "sequence",
        "kind": "tuple",
        "items": [
            {"type": "namedtuple", "class_name": "Picked", "fields": ["values", "indices"], "items": leaves[:2]},
            {"type": "mapping", "keys": ["rows", "fixed"], "items": [leaves[2], constants[0]]},
            *constants,
        ],
    }
    sizes = [{"dimension": "batch", "scale": 1, "offset": 0}, {"dimension": "rows", "scale": 16, "offset": -16}, 4]
    call["inputs"].append({"name": "options.0", "dtype": "int64", "shape": sizes})
    value = {"type": "sequence", "kind": "list", "items": [{"type": "tensor", "index": 1}, *constants]}
    call["parameters"].append({"name": "options", "kind": "keyword", "value": value})
    call["dimensions"].append({"name": "rows", "min": 1, "max": 8})
    for name, dtype, references in (
        ("0.values", "float32", {}),
        ("0.indices", "int64", {"ranking_of": "0.values"}),
        ("1.rows", "bfloat16", {"rows_of": "0.indices"}),
    ):
        tolerance = {"rtol": 0.0, "atol": 1e-5, "ranking_of": None, "rows_of": None, **references}
        call["outputs"].append({"name": name, "dtype": dtype, "shape": sizes, "tolerance": tolerance})
    del call["outputs"][0]
    rich["cases"][0]["sizes"]["rows"] = 2
    rich["program"] = {"record": samples.CODE, "device": "cuda", "built_with_torch": "2.13.0+cu130"}
    rich["source"]["model_kwargs"] = {"depth": 2, "scale": 0.5, "flag": True, "name": "x", "nothing": None}
    rich["provenance"] |= {"commit": "0" * 40, "dirty": True}
    return [json.dumps(document()).encode(), json.dumps(rich).encode()]


def archives() -> list[bytes]:
    """To start from: whole packages, and an archive of nothing."""
    return [*map(package, manifests()), archive(full({}))]


def signatures() -> list[bytes]:
    """To start from: a signature file."""
    one = {"key_id": promises.KEY_ID, "algorithm": "ed25519", "signature": base64.b64encode(bytes(64)).decode()}
    whole = {"format_version": 1, "manifest_sha256": "2" * 64, "file_sha256": promises.FILE_SHA256}
    return [
        json.dumps({**whole, "signatures": signed}).encode() for signed in ([one], [one, {**one, "key_id": "3" * 64}])
    ]


def bundles() -> list[bytes]:
    """To start from: a bundle that the promise takes."""

    class Key:
        class public:
            id = promises.KEY_ID

        @staticmethod
        def sign(message: bytes) -> bytes:
            return message[:64]

    return [openssf.sign("model.pt2", promises.FILE_SHA256, Key)]  # type: ignore[arg-type]


def mutate_json(data: bytes, bytewise: Bytes, chance: random.Random) -> bytes:
    """A document with parts exchanged, dropped, repeated or replaced; or with its bytes changed."""
    if chance.random() < 0.3:
        return bytewise(data)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return bytewise(data)
    for _ in range(chance.randint(1, 3)):
        value = _changed(value, chance)
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return data


def mutate_signature(data: bytes, bytewise: Bytes, chance: random.Random) -> bytes:
    """As `mutate_json`, half of the time of a whole one: what is refused already seldom becomes one again."""
    return mutate_json(chance.choice([data, chance.choice(_SIGNATURES)]), bytewise, chance)


def mutate_bundle(data: bytes, bytewise: Bytes, chance: random.Random) -> bytes:
    """As `mutate_json`, of the bundle or of the statement in it."""
    data = chance.choice([data, *_BUNDLES])
    if chance.random() < 0.5:
        return mutate_json(data, bytewise, chance)
    try:
        document = json.loads(data)
        envelope = document["dsseEnvelope"]
        statement = base64.b64decode(envelope["payload"])
        envelope["payload"] = base64.b64encode(mutate_json(statement, bytewise, chance)).decode()
        return json.dumps(document).encode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return bytewise(data)


def mutate_manifest(data: bytes, bytewise: Bytes, chance: random.Random) -> bytes:
    """As `mutate_json`, half of the time of a whole one: what is refused already seldom becomes one again."""
    return mutate_json(chance.choice([data, chance.choice(_MANIFESTS)]), bytewise, chance)


def mutate_archive(data: bytes, bytewise: Bytes, chance: random.Random) -> bytes:
    """A package with another manifest, other records, another header, or other bytes."""
    if chance.random() < 0.5:
        data = chance.choice(_ARCHIVES)
    kind = chance.randrange(6)
    contents = _contents(data)
    if kind == 0 or contents is None:
        return bytewise(data)
    if kind == 1:
        return _other_header(data, chance)
    if kind == 2:
        return bytewise(data[-200:]).join([data[:-200], b""])
    manifest = contents.pop(MANIFEST_NAME, b"{}")
    if kind == 3:
        return archive(full({MANIFEST_NAME: mutate_manifest(manifest, bytewise, chance), **contents}))
    contents = _other_records(contents, bytewise, chance)
    try:
        described = json.loads(manifest)
        described["records"] = [{"name": r.name, "size": r.size, "sha256": r.sha256} for r in listing(contents)]
        manifest = json.dumps(described).encode()
    except (ValueError, TypeError, RecursionError):
        pass
    pairs = full({MANIFEST_NAME: manifest, **(dict(sorted(contents.items())) if kind == 4 else contents)})
    if kind == 5 and chance.random() < 0.3:
        pairs.insert(chance.randrange(len(pairs) + 1), chance.choice(pairs))
    return archive(pairs)


def _changed(value: Any, chance: random.Random) -> Any:
    """The value with one place of it changed."""
    places = [((), value)]
    for path, part in places:
        if len(places) > 5000:
            break
        children = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        places += [((*path, key), child) for key, child in children]
    path, part = chance.choice(places)
    new = _replacement(part, [other for _, other in places], chance)
    if not path:
        return new
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    if chance.random() < 0.15:
        del parent[path[-1]]
    elif isinstance(parent, list) and chance.random() < 0.3:
        parent.insert(path[-1], new)
    elif isinstance(parent, dict) and chance.random() < 0.1:
        parent[chance.choice(_TEXTS)] = new
    else:
        parent[path[-1]] = new
    return value


def _replacement(part: Any, others: list[Any], chance: random.Random) -> Any:
    kind = chance.randrange(7)
    if kind == 0:
        return json.loads(json.dumps(chance.choice(others)))
    if kind == 1:
        return chance.choice(_NUMBERS)
    if kind == 2:
        return chance.choice(_TEXTS)
    if kind == 3 and isinstance(part, str) and part:
        at = chance.randrange(len(part))
        return part[:at] + chance.choice(_TEXTS) + part[at + chance.randint(0, 2) :]
    if kind == 4 and isinstance(part, (int, float)):
        return part + chance.choice([-1, 1, 0.5])
    if kind == 5:
        for _ in range(chance.randint(1, 40)):
            part = {"type": "sequence", "kind": "list", "items": [part]}
        return part
    return chance.choice([None, True, False, [], {}, 1e308, 0.0, {"type": "tensor", "index": 0}])


def _contents(data: bytes) -> dict[str, bytes] | None:
    """The records of what is nearly a package, read without a check."""
    try:
        with promises.file_of(data) as path, open(path, "rb") as file:
            headers = read_directory(file.fileno(), len(data))
        found = {}
        for header in headers[:200]:
            lengths = struct.unpack_from("<HH", data, header.offset + 26)
            start = header.offset + 30 + sum(lengths)
            found[header.name.removeprefix(f"{ROOT}/")] = data[start : start + min(header.size, 1 << 20)]
        return found
    except Exception:  # whatever is wrong with it: then it is mutated as bytes
        return None


def _other_records(contents: dict[str, bytes], bytewise: Bytes, chance: random.Random) -> dict[str, bytes]:
    contents = dict(contents) or records()
    name = chance.choice(sorted(contents))
    kind = chance.randrange(4)
    if kind == 0:
        contents[name] = bytewise(contents[name])
    elif kind == 1:
        new = chance.choice([*_TEXTS, f"{name}/x", f"{name}x", name.upper(), name.replace("/", "//", 1)])
        contents[new.encode(errors="replace").decode()] = b"new"
    elif kind == 2:
        del contents[name]
    else:
        contents[name] = bytes(chance.choice([0, 1, 63, 64, 65, 4096]))
    return contents


def _other_header(data: bytes, chance: random.Random) -> bytes:
    """One field of one header, in the directory or before a record, set to a telling number."""
    places = [at for at in range(len(data) - 46) if data[at : at + 4] in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x06\x06")]
    if not places:
        return data
    changed = bytearray(data)
    at = chance.choice(places)
    offset, form = chance.choice(_HEADER_FIELDS)
    size = struct.calcsize(form)
    number = chance.choice([0, 1, 8, 0xFFFF, 0xFFFFFFFF, chance.getrandbits(32)]) % (1 << 8 * size)
    struct.pack_into(form, changed, at + offset, number)
    return bytes(changed)


_MANIFESTS = manifests()
_ARCHIVES = archives()
_SIGNATURES = signatures()
_BUNDLES = bundles()

# What is promised, how to come near to breaking it, and what to start from.
PROMISES: dict[str, tuple[Callable[[bytes], bool], Callable[[bytes, Bytes, random.Random], bytes], list[bytes]]] = {
    "manifest": (promises.manifest, mutate_manifest, _MANIFESTS),
    "archive": (promises.archive, mutate_archive, _ARCHIVES),
    "signature": (promises.signature, mutate_signature, _SIGNATURES),
    "bundle": (promises.bundle, mutate_bundle, _BUNDLES),
}
