"""exportkit.h says of rows what the server says: by the manifest, and by the recorded cases."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

import exportkit
from exportkit.package import manifest as m
from exportkit.serve.engine.batchable import row_dimension
from exportkit.serve.engine.model_replica import ModelReplica
from exportkit.serve.engine.row_trials import try_rows as try_in_python
from tests.artifacts import artifact
from tests.runtime import c_interface, counting, everything, tiny
from tests.runtime.c_interface import Refused
from tests.runtime.c_requests import try_rows
from tests.serve.engine import rows, ticker

USAGE = 200
BATCH = m.Size(dimension="batch")
TOLERANCE = m.OutputTolerance(rtol=0.0, atol=0.0)


def call(inputs: list[tuple], outputs: list[tuple], least: int = 1, most: int = 8) -> m.Call:
    return m.Call(
        parameters=(),
        inputs=tuple(
            m.TensorInput(name=f"in{i}", dtype="float32", shape=shape, written=None) for i, shape in enumerate(inputs)
        ),
        result=m.ConstantNode(value=None),
        outputs=tuple(
            m.TensorOutput(name=f"out{i}", dtype="float32", shape=shape, tolerance=TOLERANCE)
            for i, shape in enumerate(outputs)
        ),
        dimensions=(m.Dimension(name="batch", min=least, max=most), m.Dimension(name="n", min=1, max=8)),
    )


def by_manifest(model: c_interface.Model, name: str) -> str:
    """The row dimension of a method, or why there is none."""
    about = model.method(name)
    if about.row_dimension >= 0:
        assert about.row_reason == b""
        return about.dimensions[about.row_dimension].contents.name.decode()
    return about.row_reason.decode()


def agree(library: c_interface.Library, package: Path) -> str:
    """What both say of the last method."""
    with library.open(package) as model, exportkit.load(package) as loaded:
        for method in loaded.manifest.methods:
            wanted = row_dimension(loaded.manifest, method)
            said = by_manifest(model, method.name)
            assert said == (wanted if isinstance(wanted, str) else wanted.name)
    return said


def test_the_rows_of_a_method_are_those_that_the_server_finds(c_library, tmp_path, tiny_package, recorder_package):
    for package in (
        tiny_package,
        recorder_package,
        rows.write(tmp_path / "rows.pt2"),
        ticker.write(tmp_path / "ticker.pt2"),
        everything.write(tmp_path / "everything.pt2"),
        counting.write(tmp_path / "counting.pt2"),
        artifact("words"),
        artifact("notebook"),
    ):
        agree(c_library, package)


N, TWICE, MORE = m.Size(dimension="n"), m.Size(dimension="batch", scale=2), m.Size(dimension="batch", offset=1)


@pytest.mark.parametrize(
    ("inputs", "outputs", "range_", "said"),
    [
        ([(BATCH, 3, m.Size(dimension="n", scale=16)), (BATCH,)], [(BATCH, N), (BATCH, None)], (1, 8), "batch"),
        ([], [(4,)], (1, 8), "no inputs"),
        ([(BATCH,)], [], (1, 8), "no outputs"),
        ([()], [(4,)], (1, 8), "`in0` does not vary"),
        ([(4, 3), (BATCH,)], [(BATCH,)], (1, 8), "`in0` does not vary"),
        ([(BATCH, 3), (5,)], [(BATCH,)], (1, 8), "`in1` is not batch"),
        ([(BATCH,), (N,)], [(BATCH,)], (1, 8), "`in1` is not batch"),
        ([(BATCH,), (TWICE,)], [(BATCH,)], (1, 8), "`in1` is not batch"),
        ([(BATCH,), (MORE,)], [(BATCH,)], (1, 8), "`in1` is not batch"),
        ([(TWICE, 3)], [(BATCH,)], (1, 8), "`in0` is not batch"),
        ([(BATCH, BATCH)], [(BATCH,)], (1, 8), "`in0` in dimension 1 depends on batch as well"),
        ([(BATCH,)], [(BATCH, TWICE)], (1, 8), "`0` in dimension 1 depends on batch as well"),
        ([(BATCH,)], [()], (1, 8), "`0` is not batch"),
        ([(BATCH,)], [(None,)], (1, 8), "`0` is not batch"),
        ([(BATCH,)], [(3, BATCH)], (1, 8), "`0` is not batch"),
        ([(BATCH,)], [(BATCH,)], (1, 1), "from 1 to 1, which leaves no room"),
        ([(BATCH,)], [(BATCH,)], (0, 1), "from 0 to 1, which leaves no room"),
        ([(BATCH,)], [(BATCH,)], (2, 3), "from 2 to 3, which leaves no room"),
        ([(BATCH,)], [(BATCH,)], (2, 4), "batch"),
    ],
)
def test_a_method_without_rows_says_why_in_the_servers_words(c_library, tmp_path, inputs, outputs, range_, said):
    given = call(inputs, outputs, *range_)
    used = {size.dimension for tensor in given.inputs for size in tensor.shape if isinstance(size, m.Size)}
    complete = msgspec.structs.replace(
        given,
        parameters=tuple(
            m.Parameter(name=tensor.name, kind="positional", value=m.TensorNode(index=place))
            for place, tensor in enumerate(given.inputs)
        ),
        outputs=tuple(msgspec.structs.replace(each, name=str(place)) for place, each in enumerate(given.outputs)),
        result=m.SequenceNode(kind="list", items=tuple(m.TensorNode(index=place) for place in range(len(outputs)))),
        dimensions=tuple(each for each in given.dimensions if each.name in used),
    )
    assert said in agree(c_library, tiny.write(tmp_path / "rows.pt2", tiny.tiny_files(), call=complete))


def test_state_of_one_size_has_no_rows(c_library, tmp_path):
    def fixed(manifest: m.Manifest) -> m.Manifest:
        state = msgspec.structs.replace(manifest.state[0], shape=(64,))
        return msgspec.structs.replace(manifest, state=(state,), cases=())

    agree(c_library, ticker.write(tmp_path / "ticker.pt2", change=fixed))


# --- what the recorded cases show -------------------------------------------------------------------------------------


def of_server(package: Path, most: int) -> tuple[int, str | None]:
    """What the server finds."""
    replica = ModelReplica(lambda: exportkit.load(package))
    try:
        method = replica.model.manifest.method()
        found = row_dimension(replica.model.manifest, method)
        assert isinstance(found, m.Dimension)
        tried = try_in_python(replica, method, found, min(most, found.max))
        return (tried.max_rows, None) if tried.enabled else (0, tried.reason)
    finally:
        replica.close()


def same(one: str | None, other: str | None) -> bool:
    """By how much outputs differ is said in words of each."""
    return (one and one.partition(" (")[0]) == (other and other.partition(" (")[0])


def loosened(manifest: m.Manifest) -> m.Manifest:
    loose = m.OutputTolerance(rtol=0.0, atol=m.ANY_VALUE)
    outputs = tuple(msgspec.structs.replace(each, tolerance=loose) for each in manifest.call.outputs[:1])
    changed = msgspec.structs.replace(manifest.call, outputs=(*outputs, *manifest.call.outputs[1:]))
    return msgspec.structs.replace(manifest, methods=tiny.forward(changed))


def test_recorded_cases_show_what_they_show_the_server(c_library, tmp_path):
    equal = {name: torch.zeros_like(tensor) for name, tensor in rows.example(4, coupling=1.0).items()}
    packages = {
        "independent": rows.write(tmp_path / "independent.pt2", rows.example(4), rows.example(1)),
        "pairs": rows.write(tmp_path / "pairs.pt2", rows.example(2), least=2),
        "coupled": rows.write(tmp_path / "coupled.pt2", rows.example(1, coupling=1.0)),
        "no cases": rows.write(tmp_path / "none.pt2"),
        "equal rows": rows.write(tmp_path / "equal.pt2", equal),
        "any values": rows.write(tmp_path / "any.pt2", rows.example(2), change=loosened),
        "sequences": ticker.write(tmp_path / "ticker.pt2"),
        "coupled sequences": ticker.write(tmp_path / "coupled_ticker.pt2", coupling=1.0),
        "no sequences": counting.write(tmp_path / "counting.pt2"),
        "indices": artifact("words"),
    }
    shown = {}
    for name, package in packages.items():
        for most in (5, 1 << 40):
            with c_library.open(package) as model:
                found, reason = shown[name] = try_rows(model, most)
            wanted, wanted_reason = of_server(package, most)
            assert found == wanted, (name, reason, wanted_reason)
            assert same(reason, wanted_reason), (reason, wanted_reason)
    assert {name for name, (found, _) in shown.items() if found} == {"independent", "pairs", "sequences", "indices"}


def test_rows_are_asked_for_with_a_number_and_of_a_method(c_library, tmp_path, recorder_package, tiny_package):
    with c_library.open(rows.write(tmp_path / "rows.pt2", rows.example(4))) as model:
        for most in (0, 1):
            assert try_rows(model, most) == (
                0,
                f"batches have at most {most} rows, which leaves no room for two requests",
            )
        for most, name, message in ((-1, None, "most must not be negative, got -1"), (2, "push", "no method 'push'")):
            with pytest.raises(Refused, match=message) as error:
                try_rows(model, most, name)
            assert error.value.code == USAGE
    with c_library.open(tiny_package) as model:
        assert try_rows(model, 8)[1] == by_manifest(model, "forward")
    with c_library.open(recorder_package) as model:
        assert "a request does not get back" in try_rows(model, 8, "fill")[1]
