from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exportkit.errors import MergeError, MissingLibraryError, SchemaChangedError, UsageError
from exportkit.inspect.sections import Section, sections
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.assemble import assemble
from exportkit.package.consistency import is_complete, libraries_for, missing_operators
from exportkit.package.manifest import Dimension, Library, Operator, PackagedMethod, Target, code_folder
from exportkit.runtime.targets import Host, pick
from tests.package import samples, stateful_samples

CUDA = samples.target(name="gpu", device="cuda", cpu_isa=None, cuda_architecture="9.0", built_with_cuda="13.0")

X86_HOST = Host("linux-x86_64", "x86-64-v4", "2.13.0")
ARM_HOST = Host("linux-aarch64", "armv8.2-a+dotprod", "2.13.0")

IMAGE = samples.manifest().call.inputs[0]


def artifact(path: Path, *, target: Target | None = None, case: bytes | None = None, **changes: Any) -> Path:
    """What `export` writes: no libraries."""
    target = samples.target() if target is None else target
    records = {f"data/aotinductor/{target.name}/model.wrapper.so": target.name.encode()}
    records[samples.WEIGHT] = samples.RECORDS[samples.WEIGHT]
    records[samples.CASE] = samples.RECORDS[samples.CASE] if case is None else case
    write_package(path, samples.manifest(libraries=(), targets=(target,), **changes), records)
    return path


def library(
    folder: Path, name: str = "libtoy_cpu.so", content: bytes = b"toy\0", **changes: Any
) -> tuple[Path, Library]:
    """A library's file, and what `describe_library` might say of it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    described = msgspec.structs.replace(
        samples.manifest().libraries[0],
        record=f"exportkit/ops/linux-x86_64/{name}",
        sha256=hashlib.sha256(content).hexdigest(),
    )
    return folder / name, msgspec.structs.replace(described, **changes)


def kernels_only(folder: Path, **changes: Any) -> tuple[Path, Library]:
    changes = {"device": "cuda", "kernels": ("cuda",), "defines": (), **changes}
    return library(folder, "libtoy_cuda.so", b"toy cuda", **changes)


def test_an_artifact_and_its_library_become_a_complete_package(tmp_path: Path) -> None:
    source = artifact(tmp_path / "cpu.pt2")
    with PackageReader(source) as reader:
        assert not is_complete(reader.manifest)
        assert missing_operators(reader.manifest, reader.manifest.targets[0]) == reader.manifest.operators
    manifest = assemble([source], [library(tmp_path)] * 2, tmp_path / "toy.pt2")  # given twice, it is one
    assert is_complete(manifest)
    assert len(manifest.libraries) == 1
    with PackageReader(tmp_path / "toy.pt2") as reader:
        reader.verify()
        assert reader.manifest == manifest
        assert reader.read(samples.LIBRARY) == b"toy\0"
        assert reader.read(samples.CODE) == b"cpu_v3"


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    sources = [artifact(tmp_path / "cpu.pt2"), artifact(tmp_path / "cuda.pt2", target=CUDA)]
    both = [library(tmp_path), kernels_only(tmp_path)]
    assemble(sources, both, tmp_path / "one.pt2")
    assemble(sources, both[::-1], tmp_path / "two.pt2")
    assemble([tmp_path / "one.pt2"], [], tmp_path / "again.pt2")
    assert (tmp_path / "one.pt2").read_bytes() == (tmp_path / "two.pt2").read_bytes()
    assert (tmp_path / "one.pt2").read_bytes() == (tmp_path / "again.pt2").read_bytes()


ARM = samples.target(name="arm", platform="linux-aarch64", cpu_isa="armv8-a")


def arm_library(folder: Path) -> tuple[Path, Library]:
    record = "exportkit/ops/linux-aarch64/libtoy_cpu.so"
    return library(folder / "aarch64", content=b"toy\0arm", record=record, platform="linux-aarch64")


def test_one_package_has_targets_and_libraries_of_two_platforms_and_its_weights_once(tmp_path: Path) -> None:
    sources = [artifact(tmp_path / "x86.pt2"), artifact(tmp_path / "arm.pt2", target=ARM)]
    manifest = assemble(sources, [library(tmp_path), arm_library(tmp_path)], tmp_path / "toy.pt2")
    assert is_complete(manifest)
    assert manifest.weights == (samples.weight(),)
    with PackageReader(tmp_path / "toy.pt2") as reader:
        reader.verify()
        for target, host in ((samples.target(), X86_HOST), (ARM, ARM_HOST)):
            assert pick(manifest.targets, "auto", host, manifest.libraries).target == target
            (its,) = libraries_for(manifest, target)
            assert (its.platform, target.platform) == (host.platform, host.platform)
            assert reader.read(f"data/aotinductor/{target.name}/model.wrapper.so") == target.name.encode()


def test_a_platform_without_its_library_is_refused_with_the_option_to_give_it(tmp_path: Path) -> None:
    sources = [artifact(tmp_path / "x86.pt2"), artifact(tmp_path / "arm.pt2", target=ARM)]
    with pytest.raises(MissingLibraryError, match=r"linux-x86_64/libtoy_cpu\.so has it for another platform"):
        assemble(sources, [library(tmp_path)], tmp_path / "toy.pt2")


def test_one_library_with_kernels_for_both_devices_serves_both_targets(tmp_path: Path) -> None:
    both = library(tmp_path, "_C.abi3.so", kernels=("cpu", "cuda"), needs=("libcudart.so.13",))
    sources = [artifact(tmp_path / "cpu.pt2"), artifact(tmp_path / "cuda.pt2", target=CUDA)]
    manifest = assemble(sources, [both], tmp_path / "toy.pt2")
    assert is_complete(manifest)
    for target in manifest.targets:
        assert [Path(lib.record).name for lib in libraries_for(manifest, target)] == ["_C.abi3.so"]


def test_libraries_are_listed_after_those_that_they_need(tmp_path: Path) -> None:
    needed = library(tmp_path, "libz.so", b"z", kernels=(), defines=(), needs=())
    also = library(tmp_path, "libm.so", b"m", kernels=(), defines=(), needs=("libz.so", "libc.so.6"))
    main = library(tmp_path, needs=("libm.so", "libz.so"))
    for given in ([main, also, needed], [needed, main, also]):
        manifest = assemble([artifact(tmp_path / "cpu.pt2")], given, tmp_path / "toy.pt2")
        loaded = [Path(lib.record).name for lib in libraries_for(manifest, samples.target())]
        assert loaded == ["libz.so", "libm.so", "libtoy_cpu.so"]
    assert assemble([tmp_path / "toy.pt2"], [], tmp_path / "again.pt2").libraries == manifest.libraries


def test_a_library_that_a_cpu_and_a_cuda_library_need_is_for_both(tmp_path: Path) -> None:
    needed = [
        library(tmp_path, "libz.so", b"z", device=device, kernels=(), defines=(), needs=())
        for device in ("cuda", "cpu")
    ]
    sources = [artifact(tmp_path / "cpu.pt2"), artifact(tmp_path / "cuda.pt2", target=CUDA)]
    manifest = assemble(sources, [*needed, library(tmp_path), kernels_only(tmp_path)], tmp_path / "toy.pt2")
    cpu, gpu = ([Path(lib.record).name for lib in libraries_for(manifest, each)] for each in (samples.target(), CUDA))
    assert cpu == ["libtoy_cpu.so", "libz.so"]
    assert gpu == ["libtoy_cpu.so", "libz.so", "libtoy_cuda.so"]


def test_name_and_version_are_the_callers_to_say(tmp_path: Path) -> None:
    manifest = assemble(
        [artifact(tmp_path / "a.pt2")], [library(tmp_path)], tmp_path / "toy.pt2", name="mine", version="7"
    )
    assert (manifest.name, manifest.version) == ("mine", "7")
    for name in ("", "no/name", "-x", "new\n"):
        with pytest.raises(UsageError, match="invalid package name"):
            assemble([tmp_path / "a.pt2"], [library(tmp_path)], tmp_path / "bad.pt2", name=name)
    with pytest.raises(UsageError, match="no artifact was given"):
        assemble([], [], tmp_path / "toy.pt2")


def test_an_operator_without_library_is_named_with_the_option_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(MissingLibraryError, match="has the operator toy::twice") as caught:
        assemble([artifact(tmp_path / "cpu.pt2")], [], tmp_path / "toy.pt2")
    assert "--op-library" in (caught.value.hint or "")
    assert not (tmp_path / "toy.pt2").exists()


@pytest.mark.parametrize("adds_to", [None, ("other::twice", "toyota::twice")])
def test_a_cuda_target_needs_cuda_kernels_of_the_namespace(tmp_path: Path, adds_to: tuple[str, ...] | None) -> None:
    libraries = [library(tmp_path)] + ([kernels_only(tmp_path, adds_to=adds_to)] if adds_to else [])
    with pytest.raises(MissingLibraryError, match=r"no library has cuda kernels for the operators toy::\*") as caught:
        assemble([artifact(tmp_path / "cuda.pt2", target=CUDA)], libraries, tmp_path / "toy.pt2")
    assert "cuda kernels as well: --op-library" in (caught.value.hint or "")


def test_kernels_count_that_were_added_by_full_names_or_call_other_operators(tmp_path: Path) -> None:
    source = artifact(tmp_path / "c.pt2", target=CUDA)
    by_name = [library(tmp_path), kernels_only(tmp_path, adds_to=("toy::twice",))]
    for libraries in (by_name, [library(tmp_path, kernels=("any",))]):
        assert is_complete(assemble([source], libraries, tmp_path / "toy.pt2"))


def changed_call(**changes: Any) -> tuple[PackagedMethod, ...]:
    """The only method, with a part of its call changed."""
    call = msgspec.structs.replace(samples.manifest().call, **changes)
    return (msgspec.structs.replace(samples.manifest().methods[0], call=call),)


NEWER = Operator(name="toy::twice", schema="toy::twice(Tensor x, int n=2) -> Tensor")
BOUNDED = changed_call(dimensions=(Dimension(name="batch", min=1, max=8),))
HALF = changed_call(inputs=(msgspec.structs.replace(IMAGE, dtype="float16"),))
BOTH = r"cpu\.pt2 and gpu\.pt2 .*"
OTHER_WEIGHTS: list[dict[str, Any]] = [{"strides": (1, 2)}, {"aliases": ()}, {"state": False}]


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"methods": BOUNDED}, MergeError, BOTH + '"max":8'),
        ({"methods": HALF}, MergeError, BOTH + "inputs: .*float32.* and .*float16"),
        ({"operators": (NEWER,)}, SchemaChangedError, "different schemas of toy::twice"),
        *(
            ({"weights": (samples.weight(**change),)}, MergeError, BOTH + "have different weights named 'head.weight'")
            for change in OTHER_WEIGHTS
        ),
    ],
)
def test_artifacts_of_two_models_are_refused_with_what_differs(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    sources = [artifact(tmp_path / "cpu.pt2"), artifact(tmp_path / "gpu.pt2", target=CUDA, **changes)]
    with pytest.raises(error, match=named):
        assemble(sources, [library(tmp_path)], tmp_path / "toy.pt2")


def test_a_library_with_another_schema_is_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(SchemaChangedError, match=r"int n=2.*traced with 'toy::twice\(Tensor x\)"):
        assemble([artifact(tmp_path / "cpu.pt2")], [library(tmp_path, defines=(NEWER,))], tmp_path / "toy.pt2")


# --- weights ----------------------------------------------------------------------------------------------------------


def test_targets_share_their_weights_and_a_record_that_only_one_needs_is_kept(tmp_path: Path) -> None:
    unread = samples.weight(name="bias", aliases=(), shape=(6,), strides=(1,), record=None)
    read = msgspec.structs.replace(unread, record=samples.WEIGHT)
    cuda = msgspec.structs.replace(CUDA, constants={"forward": {"head.weight": "head.weight", "bias": "bias"}})
    sources = [
        artifact(tmp_path / "cpu.pt2", weights=(samples.weight(), unread)),
        artifact(tmp_path / "cuda.pt2", target=cuda, weights=(samples.weight(), read)),
    ]
    for order in (sources, sources[::-1]):
        manifest = assemble(order, [library(tmp_path), kernels_only(tmp_path)], tmp_path / "toy.pt2")
        assert manifest.weights == (samples.weight(), read)
        assert [record.name for record in manifest.records].count(samples.WEIGHT) == 1


def test_an_artifact_with_weights_inside_goes_with_one_that_has_them_outside(tmp_path: Path) -> None:
    target = msgspec.structs.replace(CUDA, constants={"forward": {}})
    sources = [artifact(tmp_path / "cuda.pt2", target=target, weights=()), artifact(tmp_path / "cpu.pt2")]
    manifest = assemble(sources, [library(tmp_path), kernels_only(tmp_path)], tmp_path / "toy.pt2")
    assert manifest.weights == (samples.weight(),)


# --- methods and state ------------------------------------------------------------------------------------------------


def stateful_artifact(path: Path, target: Target, **changes: Any) -> Path:
    """An artifact of the sample with two methods and state."""
    target = msgspec.structs.replace(target, constants=stateful_samples.manifest().targets[0].constants)
    folders = (code_folder(target.name, name) for name in ("forward", "decode"))
    code = {f"data/aotinductor/{folder}/model.wrapper.so": folder.encode() for folder in folders}
    kept = (samples.WEIGHT, samples.CASE, stateful_samples.SEQUENCE, stateful_samples.INITIAL)
    records = code | {name: stateful_samples.RECORDS[name] for name in kept}
    write_package(path, stateful_samples.manifest(libraries=(), targets=(target,), **changes), records)
    return path


def test_targets_share_state_and_each_has_the_code_of_all_methods(tmp_path: Path) -> None:
    sources = [
        stateful_artifact(tmp_path / "cpu.pt2", samples.target()),
        stateful_artifact(tmp_path / "cuda.pt2", CUDA),
    ]
    manifest = assemble(sources, [library(tmp_path), kernels_only(tmp_path)], tmp_path / "toy.pt2")
    plain = stateful_samples.manifest()
    assert (manifest.methods, manifest.state, manifest.cases) == (plain.methods, plain.state, plain.cases)
    with PackageReader(tmp_path / "toy.pt2") as reader:
        for folder in ("cpu_v3", "decode.cpu_v3", "gpu", "decode.gpu"):
            assert reader.read(f"data/aotinductor/{folder}/model.wrapper.so") == folder.encode()
        assert reader.names.count(stateful_samples.INITIAL) == 1
        reader.read_case(1)


FORWARD, DECODE = stateful_samples.manifest().methods
KEYS, STEP = stateful_samples.state()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"methods": (DECODE, FORWARD)}, "different methods: forward, decode and decode, forward"),
        ({"methods": (FORWARD, msgspec.structs.replace(DECODE, state=DECODE.state[::-1]))}, "state in decode"),
        ({"state": (KEYS, msgspec.structs.replace(STEP, name="steps"))}, 'different state: .*"step".*"steps"'),
        ({"state": (msgspec.structs.replace(KEYS, initial=None), STEP)}, "different state: .*exportkit/state"),
    ],
)
def test_artifacts_whose_methods_or_state_differ_are_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    other = stateful_artifact(tmp_path / "cuda.pt2", CUDA, cases=(), **changes)
    with pytest.raises(MergeError, match=rf"cpu\.pt2 and cuda\.pt2 .*{named}"):
        assemble([stateful_artifact(tmp_path / "cpu.pt2", samples.target()), other], [], tmp_path / "toy.pt2")


def statement(folder: Path, digest: str, **changes: Any) -> Path:
    said = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "libtoy_cpu.so", "digest": {"sha256": digest}}],
        "predicateType": "https://example.org/review/v1",
        "predicate": {"ok": True, "date": "2026-11-30"},
    }
    path = folder / "statement.json"
    path.write_bytes(msgspec.json.encode(said | changes))
    return path


def test_a_statement_about_a_library_travels_with_it_and_is_shown(tmp_path: Path) -> None:
    file, described = library(tmp_path)
    given = statement(tmp_path, described.sha256)
    assemble([artifact(tmp_path / "cpu.pt2")], [(file, described)], tmp_path / "toy.pt2", attestations=[given])
    assemble([tmp_path / "toy.pt2"], [], tmp_path / "again.pt2", attestations=[given])  # it is kept, and once
    with PackageReader(tmp_path / "again.pt2") as reader:
        (record,) = reader.manifest.libraries[0].attestations or ()
        assert record == f"exportkit/attestations/{hashlib.sha256(given.read_bytes()).hexdigest()}.json"
        assert reader.read(record) == given.read_bytes()
        said = ("libtoy_cpu.so", "https://example.org/review/v1: passed, date 2026-11-30")
        assert Section("Attestations", [said]) in sections(reader)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subject": [{"digest": {"sha256": "0" * 64}}]}, "is about no library of the package: it names 0000"),
        ({"_type": "https://in-toto.io/Statement/v0.1"}, "is no in-toto statement: its _type is"),
        ({"subject": 3}, "is no in-toto statement: Expected `array`"),
    ],
)
def test_a_statement_about_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file, described = library(tmp_path)
    given = statement(tmp_path, described.sha256, **changes)
    with pytest.raises(UsageError, match=message):
        assemble([artifact(tmp_path / "cpu.pt2")], [(file, described)], tmp_path / "toy.pt2", attestations=[given])
    assert not (tmp_path / "toy.pt2").exists()


HEAD = b'{"_type": "x", "subject": [], "predicateType": "y", "predicate": '


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"[" * 100_000, ".json, which is no in-toto statement"),
        (HEAD + b'{"a":' * 100_000, "no in-toto statement"),
        (b"\xff", "no in-toto statement"),
        (b" " * (2 << 20), "no in-toto statement"),
        (HEAD + b'{"ok": [1], "date": {}, "torch": "2"}}', "y: torch 2"),
    ],
    ids=["deep", "deep predicate", "no text", "large", "anything"],
)
def test_a_statement_may_say_anything_and_what_is_none_is_shown_as_such(
    tmp_path: Path, content: bytes, shown: str
) -> None:
    record = "exportkit/attestations/a.json"
    described = msgspec.structs.replace(samples.manifest().libraries[0], attestations=(record,))
    write_package(tmp_path / "a.pt2", samples.manifest(libraries=(described,)), {**samples.RECORDS, record: content})
    with PackageReader(tmp_path / "a.pt2") as reader:
        (rows,) = (section.rows for section in sections(reader) if section.title == "Attestations")
    assert rows[0][1].endswith(shown)
