"""Manifests near the size cap are refused or taken in seconds: no check takes the square of what it checks."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest

from exportkit.errors import ManifestSyntaxError
from exportkit.package import manifest as m
from exportkit.package.consistency import check_consistency
from exportkit.package.manifest import decode_manifest
from tests.adversarial.forge import listing, records
from tests.package import samples

SECONDS = 10.0  # on a slow, busy machine; what is quadratic takes minutes
MANY = 30_000


def timed(check: Callable[[], object]) -> None:
    start = time.process_time()
    check()
    assert time.process_time() - start < SECONDS


def record(name: str) -> m.Record:
    return m.Record(name=name, size=0, sha256="0" * 64)


def with_records(*names: str, **changes: object) -> m.Manifest:
    listed = sorted((*listing(records()), *map(record, names)), key=lambda each: each.name)
    return msgspec.structs.replace(samples.manifest(), records=tuple(listed), **changes)


def test_a_key_that_is_there_twice_among_many() -> None:
    keys = ",".join(f'"{i}":0' for i in range(10 * MANY))
    with pytest.raises(ManifestSyntaxError, match="'7' twice"):
        timed(lambda: decode_manifest(f'{{"format_version":1,{keys},"7":0}}'.encode()))


def test_many_outputs() -> None:
    call = samples.manifest().call
    outputs = tuple(msgspec.structs.replace(call.outputs[0], name=str(i)) for i in range(MANY))
    result = m.SequenceNode(kind="list", items=tuple(m.TensorNode(index=i) for i in range(MANY)))
    manifest = with_records(call=msgspec.structs.replace(call, result=result, outputs=outputs))
    timed(lambda: check_consistency(manifest))


def test_many_targets() -> None:
    targets = [samples.target(name=f"t{i:08}") for i in range(MANY)]
    names = [f"data/aotinductor/{target.name}/a.wrapper.so" for target in targets]
    manifest = with_records(*names, targets=(samples.target(), *targets))
    timed(lambda: check_consistency(manifest))


def test_many_cases() -> None:
    names = [f"exportkit/cases/many-{i}.safetensors" for i in range(MANY)]
    manifest = with_records(*names, cases=tuple(m.Case(record=name, sizes={"batch": 2}) for name in names))
    timed(lambda: check_consistency(manifest))
