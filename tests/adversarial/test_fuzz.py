"""Random damage: what opens is the package that was written, or means one thing; anything else is a PackageError."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exportkit.errors import PackageError
from exportkit.inspect.rows import (
    dimension_text,
    input_rows,
    library_rows,
    onnx_rows,
    operator_rows,
    output_rows,
    state_rows,
    target_rows,
)
from exportkit.package.archive import PackageReader, write_package
from exportkit.package.consistency import is_complete
from exportkit.package.manifest import Manifest, decode_manifest, encode_manifest
from exportkit.package.structure import builder
from exportkit.sizes import case_label
from tests.adversarial import forge
from tests.package import samples

BOUNDED = settings(
    max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PACKAGE = forge.package()


def opened(file: Path, data: bytes) -> Manifest | PackageError:
    """The manifest of a package all of whose digests hold, or why it was refused. Nothing else may be raised."""
    file.write_bytes(data)
    try:
        with PackageReader(file) as reader:
            reader.verify()
            contents = {name: reader.read(name) for name in reader.names}
            offsets = {name: reader.data_offset(name) for name in reader.names}
    except PackageError as error:
        return error
    use(reader.manifest)
    with zipfile.ZipFile(file) as zipped:
        found = [(info.filename, zipped.read(info)) for info in zipped.infolist()]
    assert found[1:] == forge.full(contents)
    assert forge.archive(found) == data  # in the one layout
    assert all(data[at : at + len(contents[name])] == contents[name] for name, at in offsets.items())
    return reader.manifest


def use(manifest: Manifest) -> None:
    """What `inspect` and the loader do with a manifest that holds, before any of its records is looked at."""
    assert decode_manifest(encode_manifest(manifest)) == manifest
    is_complete(manifest)
    texts: list[tuple[str, ...]] = [*target_rows(manifest), *library_rows(manifest)]
    texts += [*onnx_rows(manifest), *operator_rows(manifest)]
    texts += [*state_rows(manifest), *((case_label(case),) for case in manifest.cases)]
    for method in manifest.methods:
        call = method.call
        texts += [*input_rows(call), *output_rows(method, manifest.cases), (dimension_text(call),)]
        builder(call.result)(range(len(call.outputs)))
        for parameter in call.parameters:
            builder(parameter.value)(range(len(call.inputs)))
    "".join(text for row in texts for text in row).encode()


@pytest.mark.parametrize("bit", [0, 7])
def test_no_byte_of_a_package_can_be_changed_without_notice(file: Path, bit: int) -> None:
    accepted = []
    for at in range(bit % 4, len(PACKAGE), 4):  # opening a file for each takes its time
        damaged = bytearray(PACKAGE)
        damaged[at] ^= 1 << bit
        if not isinstance(opened(file, bytes(damaged)), PackageError):
            accepted.append(at)
    assert accepted == []


EDITS = st.tuples(
    st.integers(0, len(PACKAGE)), st.integers(0, 8) | st.integers(0, len(PACKAGE)), st.binary(max_size=64)
)


@settings(BOUNDED, max_examples=300)
@given(st.lists(EDITS, min_size=1, max_size=8))
def test_bytes_changed_cut_out_or_put_in_are_refused(file: Path, edits: list[tuple[int, int, bytes]]) -> None:
    damaged = PACKAGE
    for at, length, piece in edits:
        damaged = damaged[:at] + piece + damaged[at + length :]
    if damaged != PACKAGE:
        assert isinstance(opened(file, damaged), PackageError)


@BOUNDED
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(file: Path, data: bytes) -> None:
    assert isinstance(opened(file, data), PackageError)
    assert isinstance(opened(file, data + PACKAGE[-98:]), PackageError)
    assert isinstance(opened(file, forge.package(data)), PackageError)


class Sample(NamedTuple):
    """A manifest, the records that go with it, and the paths of its values."""

    document: forge.Document
    contents: Mapping[str, bytes]
    places: Sequence[tuple[Any, ...]]


def sample_of(whole: forge.Document, contents: Mapping[str, bytes], *only: str) -> Sample:
    """Of whose values only these parts are changed, if any are named."""
    return Sample(whole, contents, [place for place in forge.places(whole)[1:] if not only or place[0] in only])


PACKAGED = sample_of(forge.document(), forge.records())
STATEFUL = sample_of(forge.stateful(), forge.STATEFUL_RECORDS, "methods", "state", "cases")
SIDECAR = sample_of(forge.sidecar(), forge.SIDECAR_RECORDS, "onnx")
JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**62, 2**63, 2**64, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["../x", "/", "cuda", "batch", "scores", samples.CASE, "0" * 64, "2.13", "a\n", "\0"]),
    st.just([]),
    st.just({}),
    st.sampled_from(PACKAGED.places).map(lambda place: forge.value_at(PACKAGED.document, place)),  # another part
)


@settings(BOUNDED, max_examples=400)
@given(data=st.data())
def test_a_manifest_with_other_values_is_refused_or_can_be_written_again(file: Path, data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from([PACKAGED, PACKAGED, STATEFUL, STATEFUL, SIDECAR]))
    changed = sample.document
    for place, value in data.draw(st.lists(st.tuples(st.sampled_from(sample.places), JSON), min_size=1, max_size=3)):
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change took the place away
            changed = forge.replaced(changed, place, value)
    try:
        encoded = msgspec.json.encode(changed)
    except OverflowError:
        return  # integers that msgspec does not write
    answer = opened(file, forge.package(encoded, sample.contents))
    if isinstance(answer, Manifest):
        again = write_package(file.with_name("again.pt2"), answer, sample.contents)
        assert again == answer
