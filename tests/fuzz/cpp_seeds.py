"""Seeds and a dictionary for the libFuzzer harnesses of csrc/package/tests: README.md beside this file says how."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save

from exportkit.package import core
from exportkit.package.archive import PackageReader
from exportkit.package.manifest import MANIFEST_NAME
from tests.adversarial import forge
from tests.package import samples, stateful_samples

ROOT = Path(__file__).parents[2]


def main(folder: Path) -> None:
    """Writes a corpus for each harness, and the words of the manifest's keys."""
    golden = sorted((ROOT / "tests" / "golden").glob("*.pt2"))
    manifests = [forge.document(), forge.document(samples.manifest(libraries=(), operators=()))]
    node = {"type": "namedtuple", "class_name": "P", "fields": ["x"], "items": [{"type": "tensor", "index": 0}]}
    pair = {"type": "sequence", "kind": "tuple", "items": [node, {"type": "constant", "value": None}]}
    named = forge.changed("call.result", pair)
    named["methods"][0]["call"]["outputs"][0]["name"] = "0.x"
    manifests += [named, forge.sidecar()]
    stateful = forge.stateful()
    every = [*manifests, stateful]
    texts = [json.dumps(one, indent=1).encode() for one in every]
    for path in golden:
        with PackageReader(path) as reader:
            texts.append(core.library().ek_package_manifest(reader.handle).bytes())
    _write(folder / "manifest", texts)
    packages = [forge.package(one) for one in manifests[:-1]] + [forge.package(manifests[-1], forge.SIDECAR_RECORDS)]
    packages += [forge.package(stateful, forge.STATEFUL_RECORDS), forge.package(b"{}"), forge.archive([])]
    _write(folder / "package", packages + [path.read_bytes() for path in golden])
    tensors = [
        {},
        {"a": np.zeros((2, 3), np.float32)},
        {"a": np.array(1), "b": np.zeros((0, 2), np.uint8)},
    ]
    _write(folder / "safetensors", [save(one, {"k": "v"}) for one in (*tensors, stateful_samples.sequence())])
    bundles = [path.read_bytes() for path in (ROOT / "tests" / "golden").glob("*.sigstore.json")]
    statements = [base64.b64decode(json.loads(one)["dsseEnvelope"]["payload"]) for one in bundles]
    _write(folder / "bundle", bundles + statements)
    _write(folder / "signature", [path.read_bytes() for path in (ROOT / "tests" / "golden").glob("*.sig")])
    text = msgspec.json.encode(every).decode() + MANIFEST_NAME + b"".join(bundles + statements).decode()
    words = sorted({json.dumps(word) for word in re.findall(r"[A-Za-z_][\w./:-]*", text)})
    (folder / "words.txt").write_text("\n".join([*words, '"9223372036854775807"', '"1e999"', '"\\\\ud800"']) + "\n")


def _write(folder: Path, seeds: list[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
