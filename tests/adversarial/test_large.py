"""Manifests near the size cap are refused or taken in seconds: no check takes the square of what it checks."""

from __future__ import annotations

import io
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import save

from exportkit.errors import CaseError, ManifestConsistencyError, ManifestSyntaxError
from exportkit.package import manifest as m
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.manifest import decode_manifest, encode_manifest
from tests.adversarial import forge
from tests.package import samples, stateful_samples
from tests.subprocesses import run_interpreter

SECONDS = 10.0  # on a slow, busy machine; what is quadratic takes minutes
MANY = 30_000


def timed(check: Callable[[], object]) -> object:
    start = time.process_time()
    answer = check()
    assert time.process_time() - start < SECONDS
    return answer


def taken(manifest: m.Manifest) -> None:
    assert timed(lambda: decode_manifest(encode_manifest(manifest))) == manifest


def with_records(*names: str, **changes: object) -> m.Manifest:
    listed = forge.listing(forge.records(dict.fromkeys(names, b"")))
    return msgspec.structs.replace(samples.manifest(), records=listed, **changes)


def test_a_key_that_is_there_twice_among_many() -> None:
    keys = ",".join(f'"{i}":0' for i in range(10 * MANY))
    with pytest.raises(ManifestSyntaxError, match="duplicate key '7'"):
        timed(lambda: decode_manifest(f'{{"format_version":1,{keys},"7":0}}'.encode()))


def test_many_outputs() -> None:
    call = samples.manifest().call
    outputs = tuple(msgspec.structs.replace(call.outputs[0], name=str(i)) for i in range(MANY))
    result = m.SequenceNode(kind="list", items=tuple(m.TensorNode(index=i) for i in range(MANY)))
    call = msgspec.structs.replace(call, result=result, outputs=outputs)
    taken(with_records(methods=(m.PackagedMethod(name="forward", call=call, state=()),)))


def test_many_targets() -> None:
    targets = [samples.target(name=f"t{i:08}") for i in range(MANY)]
    names = [f"data/aotinductor/{target.name}/a.wrapper.so" for target in targets]
    taken(with_records(*names, targets=(samples.target(), *targets)))


def test_many_cases() -> None:
    names = [f"exportkit/cases/many-{i}.safetensors" for i in range(MANY)]
    calls = (m.CaseCall(method="forward", sizes={"batch": 2}),)
    taken(with_records(*names, cases=tuple(m.Case(record=name, calls=calls) for name in names)))


# --- methods and state ------------------------------------------------------------------------------------------------

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
    path, contents = tmp_path / "many.pt2", {**stateful_samples.RECORDS, stateful_samples.SEQUENCE: save({})}
    timed(lambda: write_package(path, manifest, contents))
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


# --- what it takes to refuse ------------------------------------------------------------------------------------------

JUST_UNDER = forge.MAX_MANIFEST_BYTES - 64
HOSTILE_JSON: dict[str, bytes] = {
    "lists": b'{"format_version":1,"x":[' + b"[]," * (JUST_UNDER // 3) + b"[]]}",
    "objects": b'{"format_version":1,"x":[' + b"{}," * (JUST_UNDER // 3) + b"{}]}",
    "bare lists": b"[" + b"[]," * (JUST_UNDER // 3) + b"[]]",
    "lists of operators": b'{"format_version":1,"operators":[' + b"[]," * (JUST_UNDER // 3) + b"[]]}",
    "empty operators": b'{"format_version":1,"operators":[' + b"{}," * (JUST_UNDER // 3) + b"{}]}",
    "numbers of operators": b'{"format_version":1,"operators":[' + b"0," * (JUST_UNDER // 2) + b"0]}",
    "floats": b'{"format_version":1,"x":[' + b"0.5," * (JUST_UNDER // 4) + b"0]}",
    "numbers": b'{"format_version":1,"x":[' + (b"9" * 4000 + b",") * (JUST_UNDER // 4001) + b"0]}",
    "keys": b'{"format_version":1' + b"".join(b',"%d":0' % i for i in range(1_000_000)) + b"}",
    "escapes": b'{"format_version":1,"x":"' + b'\\"' * (JUST_UNDER // 2) + b'"}',
    "escaped letters": b'{"format_version":1,"x":"' + b"\\u0041" * (JUST_UNDER // 6) + b'"}',
    "quotes": b'"' * JUST_UNDER,
    "brackets": b"[" * JUST_UNDER,
    "spaces": b" " * JUST_UNDER,
}


def many_entries() -> bytes:
    """As large a directory as is read, with as many entries as there can be."""
    entry = forge.CENTRAL.pack(0x02014B50, 45, 45, 0, 0, 0, 0x21, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    central = entry * (forge.MAX_DIRECTORY_BYTES // len(entry))
    end = bytearray(forge.directory([]))
    struct.pack_into("<QQQQ", end, 24, 2**62, 2**62, len(central), 0)
    return central + end


def compressed() -> bytes:
    """A gigabyte of zeros, as a record of another zip tool."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        made.writestr("package/exportkit/manifest.json", b"{}")
        with made.open("package/bomb", "w", force_zip64=True) as bomb:
            for _ in range(1024):
                bomb.write(bytes(1 << 20))
    return file.getvalue()


REFUSE_ALL = """
import pathlib, resource, sys
from exportkit.errors import PackageError
from exportkit.package.archive import PackageReader
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    try:
        with PackageReader(path) as reader: reader.verify()
    except PackageError as error: print(path.name, type(error).__name__)
print(int(resource.getrusage(resource.RUSAGE_SELF).ru_utime))
"""


def with_value(path: str, text: str) -> bytes:
    """The sample's manifest with JSON put in at a place."""
    return msgspec.json.encode(forge.changed(path, "HERE")).replace(b'"HERE"', text.encode())


def contradictions() -> dict[str, bytes]:
    """Manifests of the right shape that are work to refuse: checks that copy or multiply would take minutes."""
    key, tensor = "k" * 8_000_000, '{"type":"tensor","index":%d}'
    tensors = ",".join(tensor % index for index in range(200_000))
    constants = ",".join(['{"type":"constant","value":0}'] * 200_000)
    under_key = '{"type":"mapping","keys":["%s"],"items":[{"type":"sequence","kind":"list","items":[%s]}]}'
    outputs = [{**forge.at(forge.document(), "call.outputs.0"), "name": f"{i}"} for i in range(2)]
    deep = '{"kind":"list","items":[%s],"type":"sequence"}'
    nested = deep % ",".join(['{"index":0,"type":"tensor"}'] * 400_000)
    for _ in range(34):
        nested = deep % nested
    two_long = under_key % (key, f"{tensor % 0},{tensor % 1}")
    shape = ",".join(["4611686018427387904"] * 400_000)
    return {
        "tensors under a long key": with_value("call.result", under_key % (key, tensors)),
        "constants under a long key": with_value("call.result", under_key % (key, constants)),
        "two of a long name": msgspec.json.encode(
            forge.changed("call.outputs", outputs, forge.changed("call.result", "HERE"))
        ).replace(b'"HERE"', two_long.encode()),
        "types said last": with_value("call.result", nested),
        "a weight of many sizes": with_value("weights.0.shape", f"[{shape},0]"),
        "a weight of many sizes and strides": with_value("weights.0", WEIGHT % (shape, shape)),
    }


WEIGHT = (
    '{"name":"head.weight","aliases":[],"state":true,"dtype":"float32","shape":[%s,0],"strides":[%s,0],"record":null}'
)


def make_hostile(folder: Path) -> dict[str, str]:
    """Writes packages that cost more to refuse than they should, unless care is taken; file names to error classes."""
    folder.mkdir()
    expected = {}
    for name, content in HOSTILE_JSON.items():
        (folder / name).write_bytes(forge.package(content))
        expected[name] = "ManifestSyntaxError"
    for name, content in contradictions().items():
        (folder / name).write_bytes(forge.package(content))
        expected[name] = "ManifestConsistencyError"
    for name, content, error in (
        ("directory", many_entries(), "NotAnArchiveError"),
        ("compressed", compressed(), "ArchiveLayoutError"),
        ("truncated", forge.package()[:-1], "NotAnArchiveError"),
        ("oversized", forge.package(b"[" * (forge.MAX_MANIFEST_BYTES + 1)), "ManifestTooLargeError"),
    ):
        (folder / name).write_bytes(content)
        expected[name] = error
    with open(folder / "sparse", "wb") as file:  # a terabyte that takes no room
        file.write(forge.package())
        file.truncate(1 << 40)
    return expected | {"sparse": "NotAnArchiveError"}


def test_hostile_packages_are_refused_in_half_a_gigabyte_and_seconds_each(tmp_path: Path) -> None:
    expected = make_hostile(tmp_path / "hostile")
    *said, seconds = run_interpreter(REFUSE_ALL, tmp_path / "hostile", cwd=tmp_path).splitlines()
    assert dict(line.rsplit(" ", 1) for line in said) == expected
    assert int(seconds) < SECONDS * len(expected)
