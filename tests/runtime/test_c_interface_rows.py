"""Which rows may go together: what the manifest says, and what the recorded cases show."""

from __future__ import annotations

import msgspec
import pytest
import torch

import exportkit
from exportkit.package import manifest as m
from tests.artifacts import artifact
from tests.runtime import c_interface, labelled, tiny
from tests.runtime.c_interface import Refused
from tests.runtime.c_requests import try_rows
from tests.serve.engine import rows, ticker

USAGE = 200
BATCH = tiny.BATCH


def by_manifest(model: c_interface.Model, name: str) -> str:
    """The row dimension of a method, or why there is none."""
    about = model.method(name)
    if about.row_dimension >= 0:
        assert about.row_reason == b""
        return about.dimensions[about.row_dimension].contents.name.decode()
    return about.row_reason.decode()


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
def test_rows_are_the_first_size_of_everything_and_no_other(c_library, tmp_path, inputs, outputs, range_, said):
    used = {size.dimension for shape in inputs for size in shape if isinstance(size, m.Size)}
    ranges = {name: each for name, each in {"batch": range_, "n": (1, 8)}.items() if name in used}
    described = {f"in{place}": ("float32", shape) for place, shape in enumerate(inputs)}
    call = tiny.tensors_call(described, [("float32", shape) for shape in outputs], **ranges)
    package = tiny.write(tmp_path / "rows.pt2", tiny.tiny_files(), call=call)
    with c_library.open(package) as model:
        assert said in by_manifest(model, "forward")


def test_state_of_one_size_has_no_rows(c_library, tmp_path):
    def fixed(manifest: m.Manifest) -> m.Manifest:
        state = msgspec.structs.replace(manifest.state[0], shape=(64,))
        return msgspec.structs.replace(manifest, state=(state,), cases=())

    with c_library.open(ticker.write(tmp_path / "ticker.pt2", change=fixed)) as model:
        assert by_manifest(model, "forward") == "the size of the state is not batch alone"


# --- what the recorded cases show -------------------------------------------------------------------------------------


def loosened(manifest: m.Manifest) -> m.Manifest:
    loose = m.OutputTolerance(rtol=0.0, atol=m.ANY_VALUE)
    outputs = tuple(msgspec.structs.replace(each, tolerance=loose) for each in manifest.call.outputs[:1])
    changed = msgspec.structs.replace(manifest.call, outputs=(*outputs, *manifest.call.outputs[1:]))
    return msgspec.structs.replace(manifest, methods=tiny.forward(changed))


@pytest.mark.slow
def test_recorded_cases_show_whether_rows_are_independent(c_library, tmp_path):
    equal = {name: torch.zeros_like(tensor) for name, tensor in rows.example(4, coupling=1.0).items()}
    packages = {
        "independent": rows.write(tmp_path / "independent.pt2", rows.example(4), rows.example(1)),
        "pairs": rows.write(tmp_path / "pairs.pt2", rows.example(2), least=2),
        "few": rows.write(tmp_path / "few.pt2", rows.example(4), model=rows.Few),
        "coupled": rows.write(tmp_path / "coupled.pt2", rows.example(1, coupling=1.0)),
        "no cases": rows.write(tmp_path / "none.pt2"),
        "equal rows": rows.write(tmp_path / "equal.pt2", equal),
        "any values": rows.write(tmp_path / "any.pt2", rows.example(2), change=loosened),
        "sequences": ticker.write(tmp_path / "ticker.pt2"),
        "coupled sequences": ticker.write(tmp_path / "coupled_ticker.pt2", coupling=1.0),
        "no sequences": labelled.write_counting(tmp_path / "counting.pt2"),
        "indices": artifact("words"),
    }
    most = {"independent": 32, "pairs": 32, "few": 8, "sequences": 16, "indices": 64}
    reasons = {
        "coupled": "rows influence one another: sum",
        "no cases": "no two different rows",
        "equal rows": "no two different rows",
        "any values": "the values of `sum` need not repeat",
        "coupled sequences": "sequences influence one another: 0",
        "no sequences": "no recorded sequence",
    }
    for name, package in packages.items():
        with c_library.open(package) as model, exportkit.load(package) as loaded:
            method = loaded.manifest.method().name
            for asked in (4, 1 << 40):
                found, reason = try_rows(model, asked)
                assert found == min(asked, most.get(name, 0)), reason
                assert reasons.get(name, "") in (reason or "")
                tried = loaded.try_rows(method, asked)
                assert (tried.most, tried.reason) == (found, reason or "")


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
