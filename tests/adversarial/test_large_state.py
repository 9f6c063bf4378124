"""Manifests with very many methods, calls and state tensors are taken or refused in seconds."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import save

from exportkit.errors import CaseError, ManifestConsistencyError
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.manifest import decode_manifest, encode_manifest
from tests.adversarial.test_large import timed, with_records
from tests.package import samples, stateful_samples

MANY = 20_000
NOTHING = m.Call(parameters=(), inputs=(), result=m.ConstantNode(value=None), outputs=(), dimensions=())


def method(name: str, *state: int) -> m.PackagedMethod:
    """A method that takes and returns nothing, and uses some state."""
    return m.PackagedMethod(name=name, call=NOTHING, state=tuple(m.StateUse(index=i, written=True) for i in state))


def counter(name: str) -> m.StateTensor:
    tolerance = m.OutputTolerance(rtol=0, atol=0)
    return m.StateTensor(name=name, aliases=(), dtype="int64", shape=(), initial=None, tolerance=tolerance)


def without_targets(**changes: object) -> m.Manifest:
    """A sidecar: no code, no records."""
    plain = with_records(targets=(), weights=(), libraries=(), operators=(), cases=())
    listed = tuple(record for record in plain.records if not record.name.startswith(("data/", "exportkit/ops")))
    return msgspec.structs.replace(plain, records=listed, **changes)


def onnx(name: str) -> m.Onnx:
    return m.Onnx(method=name, size=1, sha256="0" * 64, data=None, opset=20, functions=())


def taken(manifest: m.Manifest) -> None:
    assert timed(lambda: decode_manifest(encode_manifest(manifest))) == manifest


def test_many_methods_and_cases_of_them() -> None:
    names = [f"m{i}" for i in range(MANY)]
    methods = tuple(method(name, i) for i, name in enumerate(names))
    state = tuple(map(counter, names))
    calls = tuple(m.CaseCall(method=name, sizes={}) for name in names)
    case = (m.Case(record=samples.CASE, calls=calls),)
    taken(without_targets(methods=methods, state=state, onnx=tuple(map(onnx, names)), cases=case))


def test_many_methods_of_many_targets() -> None:
    methods = [method(f"m{i:04}") for i in range(150)]
    constants: dict[str, dict[str, str]] = {each.name: {} for each in methods}
    targets = tuple(samples.target(name=f"t{i:04}", constants=constants) for i in range(150))
    code = [f"data/aotinductor/{one.name}.{each.name}/a.so" for one in methods for each in targets]
    manifest = with_records(*code, methods=tuple(methods), targets=targets, cases=())
    listed = tuple(record for record in manifest.records if "cpu_v3" not in record.name)
    taken(msgspec.structs.replace(manifest, records=listed))


def test_one_method_that_uses_much_state() -> None:
    names = [f"state{i}" for i in range(MANY)]
    uses = method("forward", *range(MANY))
    state = tuple(map(counter, names))
    manifest = without_targets(methods=(uses,), state=state, onnx=(onnx("forward"),))
    taken(manifest)
    twice = msgspec.structs.replace(manifest, methods=(method("forward", *range(MANY), MANY - 1),))
    with pytest.raises(ManifestConsistencyError, match=f"uses state {MANY - 1} twice"):
        timed(lambda: decode_manifest(encode_manifest(twice)))
    clash = msgspec.structs.replace(state[-1], aliases=tuple(f"alias{i}" for i in range(MANY)) + ("state0",))
    with pytest.raises(ManifestConsistencyError, match="state 'state0' appears twice"):
        timed(lambda: decode_manifest(encode_manifest(msgspec.structs.replace(manifest, state=(*state[:-1], clash)))))


def test_many_calls_of_one_case(tmp_path: Path) -> None:
    plain = stateful_samples.manifest()
    call = msgspec.structs.replace(plain.cases[1].calls[0], accuracy={})
    sequence = m.Case(record=stateful_samples.SEQUENCE, calls=(call,) * (5 * MANY))
    manifest = stateful_samples.manifest(cases=(plain.cases[0], sequence))
    path, records = tmp_path / "many.pt2", {**stateful_samples.RECORDS, stateful_samples.SEQUENCE: save({})}
    timed(lambda: write_package(path, manifest, records))
    with PackageReader(path) as reader, pytest.raises(CaseError, match=r"has no 0\.input\.0"):
        timed(lambda: reader.read_case(1))


def test_a_long_name_of_a_method_is_refused_in_a_short_message() -> None:
    """Each folder of code is named after it."""
    for name, allowed in (("m" * 64, True), ("m" * 65, False), ("m" * 8_000_000, False)):
        manifest = without_targets(methods=(method(name),), onnx=(onnx(name),))
        if allowed:
            taken(manifest)
            continue
        with pytest.raises(ManifestConsistencyError, match="a name that is not allowed") as caught:
            decode_manifest(encode_manifest(manifest))
        assert len(str(caught.value)) < 300
