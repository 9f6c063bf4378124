"""exportkit.h, several requests in one call: each has the answers of its own call, whatever the others are."""

from __future__ import annotations

import ctypes as c
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from tests.artifacts import artifact
from tests.runtime import c_interface, everything
from tests.runtime import labelled as package
from tests.runtime.c_interface import CPU, CUDA, OWN_STREAM, Refused, view
from tests.runtime.c_requests import Ask, Gathered, codes, equal, run_requests
from tests.runtime.c_structures import Answers, DataType, Device, Piece, Request, RunOptions
from tests.runtime.threads import together

REFUSED = package.REFUSED
MODEL_RUN, REFUSED_VALUE, CLOSED, USAGE, INPUT, MEMORY = 102, 107, 103, 200, 201, 407


@pytest.fixture(scope="module")
def labelled(c_library: c_interface.Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[c_interface.Model]:
    """A model of rows and of another size, which fails where the first label is too great."""
    with c_library.open(package.write(tmp_path_factory.mktemp("labelled") / "labelled.pt2"), runners=3) as model:
        yield model


@pytest.fixture(scope="module")
def copies(c_library: c_interface.Library, tmp_path_factory: pytest.TempPathFactory) -> Iterator[c_interface.Model]:
    """A model that answers with its inputs, of every dtype."""
    with c_library.open(everything.write(tmp_path_factory.mktemp("everything") / "everything.pt2")) as model:
        yield model


def given(rows: int = 1, length: int = 4, label: int = 2) -> list[np.ndarray]:
    """Inputs of labelled."""
    return [np.random.rand(rows, length, 8).astype(np.float32), np.full(rows, label)]


def every_dtype(rows: int) -> list[np.ndarray]:
    """Inputs of copies."""
    return [numpy_of(tensor) for tensor in everything.example(rows)]


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view("V2") if tensor.dtype is torch.bfloat16 else tensor.numpy()


def alone(model: c_interface.Model, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.from_dlpack(output).copy() for output in model.run(*map(view, inputs))]


# --- answers ----------------------------------------------------------------------------------------------------------


def drawn(source: random.Random) -> tuple[Ask, int]:
    """A request in pieces, now and then a wrong one; and the code of its error."""
    inputs = given(source.randint(1, 5), source.choice([2, 3, 7]), source.randint(0, 9))
    kind = source.choice(["right"] * 6 + ["dtype", "size"])
    if kind == "dtype":
        inputs[1] = inputs[1].astype(np.int32)
    elif kind == "size":
        inputs[0] = inputs[0][..., :7].copy()
    cuts = [sorted(source.choices(range(array.nbytes + 1), k=source.choice([0, 0, 1, 3]))) for array in inputs]
    return Ask(inputs, cuts), 0 if kind == "right" else INPUT


@pytest.mark.parametrize("seed", range(4))
def test_requests_of_any_shapes_and_pieces_have_the_bits_of_their_own_calls(labelled, seed):
    source = random.Random(seed)
    for _ in range(25):
        asks, wanted = zip(*(drawn(source) for _ in range(source.randint(1, 12))))
        results = run_requests(labelled, asks, source.choice([0, 1, 2, 5, 16, 1 << 62]))
        assert codes(results) == list(wanted)
        for ask, result in zip(asks, results):
            assert isinstance(result, Refused) or equal(result, alone(labelled, ask.inputs))


def test_every_dtype_and_requests_without_rows_are_answered(copies):
    for counts in ((1,), (0,), (0, 0), (0, 2, 0), (1, 3, 2), (64,), (40, 24, 1)):
        asks = [Ask(every_dtype(rows)) for rows in counts]
        for ask, result in zip(asks, run_requests(copies, asks, 64)):
            assert equal(result, ask.inputs)


def test_inputs_that_are_not_aligned_are_read_all_the_same(copies):
    inputs = every_dtype(3)
    for shift in (1, 4):
        memory = [np.zeros(array.nbytes + shift, np.uint8) for array in inputs]
        moved = [np.ndarray(array.shape, array.dtype, bytes_, shift) for array, bytes_ in zip(inputs, memory)]
        for there, array in zip(moved, inputs):
            there[...] = array
        assert equal(run_requests(copies, [Ask(moved)], 64)[0], inputs)


def test_those_that_fit_run_in_one_call_and_a_call_that_fails_is_repeated_one_by_one(labelled):
    """The model looks at the first label alone: one that is wrong is answered behind another."""
    good, long, wrong = given(2), given(2, 5), given(2, label=REFUSED)
    for asked, most, expected in (
        ([good, wrong], 16, [0, 0]),
        ([good, long, wrong], 16, [0, 0, 0]),
        ([good, wrong], 4, [0, 0]),
        ([good, wrong], 3, [0, MODEL_RUN]),
        ([good, good, wrong, wrong], 4, [0, 0, MODEL_RUN, MODEL_RUN]),
        ([good, wrong], 1, [0, MODEL_RUN]),
        ([good, wrong], 0, [0, MODEL_RUN]),
        ([wrong, good, long], 16, [MODEL_RUN, 0, 0]),
    ):
        results = run_requests(labelled, [Ask(inputs) for inputs in asked], most)
        assert codes(results) == expected
        for inputs, result in zip(asked, results):
            assert inputs is wrong or equal(result, alone(labelled, inputs))


def test_requests_are_asked_for_memory_and_end_in_the_order_of_arrival(copies):
    order: list[int] = []
    answers = Gathered(lambda request, output: order.append(request) if output == 0 else None)
    run_requests(copies, [Ask(every_dtype(rows)) for rows in (3, 2, 4, 1)], 5, answers=answers)
    assert answers.ended == order == [0, 1, 2, 3]


def test_scalars_and_sizes_that_depend_on_values_are_answered_alone(c_library, tmp_path):
    with c_library.open(artifact("lookups")) as model:
        inputs = [
            np.array([1, 2, 3, 4]),
            np.random.rand(4, 12).astype(np.float32),
            np.array([1, 2, 1, 2]),
            np.array(2),
            np.array(1),
        ]
        wrong = [np.array([1, 2, 3, 99]), *inputs[1:]]
        results = run_requests(model, [Ask(inputs), Ask(wrong), Ask(inputs)], 64)
        assert codes(results) == [0, REFUSED_VALUE, 0]
        assert equal(results[2], alone(model, inputs))


def test_a_refused_value_fails_its_own_request_alone(c_library):
    with c_library.open(artifact("words")) as model:
        ids = [np.array([[1, 2]]), np.array([[3, 10]]), np.array([[5, 6], [7, 8]])]
        results = run_requests(model, [Ask([each]) for each in ids], 64)
        assert codes(results) == [0, REFUSED_VALUE, 0]
        assert "index 10 is out of range" in results[1].message
        assert equal(results[2], alone(model, [ids[2]]))


def test_threads_get_their_own_answers(labelled):
    def ask(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(150):
            chosen = [source.choice(requests) for _ in range(source.randint(1, 5))]
            results = run_requests(labelled, [Ask(inputs) for inputs, _ in chosen], 16, flags=OWN_STREAM)
            assert all(equal(result, expected) for result, (_, expected) in zip(results, chosen))

    requests = [(inputs, alone(labelled, inputs)) for rows in range(1, 5) for inputs in (given(rows), given(rows))]
    together(ask, range(4))


# --- where answers go -------------------------------------------------------------------------------------------------


def test_outputs_that_are_not_wanted_and_have_no_memory(copies):
    asks = [Ask(every_dtype(2)) for _ in range(3)]
    refuse = {(0, 1): 0, (1, 2): -7}
    answers = Gathered(lambda request, output: refuse.get((request, output)))
    results = run_requests(copies, asks, 64, answers=answers)
    assert codes(results) == [0, MEMORY, 0]
    assert results[1].message == "there is no memory for `2` of request 1: place returned -7"
    assert len(results[0]) == len(asks[0].inputs) - 1
    assert equal(results[2], asks[2].inputs)


@pytest.mark.parametrize(
    ("data", "device", "code", "message"),
    [(0, (CPU, 0), USAGE, "must not be null"), (64, (CUDA, 0), INPUT, "must be on cpu"), (64, (8, 1), INPUT, "type 8")],
)
def test_places_that_are_none_fail_their_request_alone(copies, data, device, code, message):
    class Elsewhere(Gathered):
        def _place(self, request, *about):
            if request != 1:
                return super()._place(request, *about)
            about[-3][0], about[-2][0] = data, Device(*device)
            return 1

    answers = Elsewhere()
    asks = [Ask(every_dtype(1)) for _ in range(3)]
    results = run_requests(copies, asks, 64, answers=answers)
    assert codes(results) == [0, code, 0]
    assert message in results[1].message
    assert equal(results[2], asks[2].inputs)


def test_another_call_may_run_where_memory_is_asked_for(copies):
    inner: list[object] = []

    def place(request: int, output: int) -> None:
        if output == 3:
            inner.extend(run_requests(copies, [Ask(every_dtype(5), [[1]] * 13)] * 2, 64))

    asks = [Ask(every_dtype(2), [[1]] * 13) for _ in range(2)]
    results = run_requests(copies, asks, 64, answers=Gathered(place))
    assert len(inner) == 4
    assert all(equal(result, ask.inputs) for result, ask in zip(results, asks))


# --- wrong callers ----------------------------------------------------------------------------------------------------


def ask_with_one_changed(model: c_interface.Model, change: Callable[[Request], object]) -> list:
    asks = [Ask(every_dtype(1)) for _ in range(3)]
    request = asks[1].c()
    change(request)
    asks[1].c = lambda: request
    return run_requests(model, asks, 64)


def shaped(*sizes: int) -> object:
    return (c.c_int64 * len(sizes))(*sizes)


def cut(request: Request, place: int, **members: object) -> None:
    for name, value in members.items():
        setattr(request.inputs[place], name, value)


HOSTILE: list[tuple[Callable[[Request], object], int, str]] = [
    (lambda r: setattr(r, "input_count", 12), INPUT, "12 tensors were given; the package takes 13"),
    (lambda r: setattr(r, "inputs", None), USAGE, "inputs must not be null"),
    (lambda r: setattr(r, "session", 5), USAGE, "forward has no state: session must be 0, got 5"),
    (lambda r: cut(r, 0, ndim=-1), INPUT, "must have 0 to 64 dimensions, got -1"),
    (lambda r: cut(r, 0, ndim=2**31 - 1), INPUT, "must have 0 to 64 dimensions"),
    (lambda r: cut(r, 0, shape=None), INPUT, "has no shape: the pointer is null"),
    (lambda r: cut(r, 0, ndim=1, shape=shaped(-1)), INPUT, "has a negative size"),
    (lambda r: cut(r, 0, ndim=2, shape=shaped(2**62, 4)), INPUT, "is too large for memory"),
    (lambda r: cut(r, 0, ndim=1, shape=shaped(2**63 - 1)), INPUT, "bytes"),
    (lambda r: cut(r, 0, dtype=DataType(17, 3, 2)), INPUT, "has a dtype that no package takes"),
    (lambda r: cut(r, 0, pieces=None), USAGE, "the pieces of `of_"),
    (lambda r: cut(r, 0, piece_count=0), INPUT, "its 0 pieces have 0"),
    (lambda r: cut(r, 0, pieces=(Piece * 1)(Piece(None, 1, Device(CPU, 0)))), USAGE, "must not be null"),
    (lambda r: cut(r, 0, pieces=(Piece * 1)(Piece(64, 1, Device(CUDA, 0)))), INPUT, "must be on cpu"),
    (lambda r: cut(r, 0, pieces=(Piece * 1)(Piece(64, 2**64 - 1, Device(CPU, 0)))), INPUT, "pieces have 1844"),
    (
        lambda r: cut(r, 0, piece_count=2, pieces=(Piece * 2)(*[Piece(64, 2**64 - 1, Device(CPU, 0))] * 2)),
        INPUT,
        "pieces have more than 1844",
    ),
]


@pytest.mark.parametrize(("change", "code", "message"), HOSTILE)
def test_a_wrong_structure_fails_its_request_alone(copies, change, code, message):
    results = ask_with_one_changed(copies, change)
    assert codes(results) == [0, code, 0]
    assert message in results[1].message


def test_an_error_for_all_leaves_every_request_alone(copies, c_model):
    for size in (0, 39, 4097, 2**63):
        with pytest.raises(Refused, match=r"requests\[1\]\.size must be sizeof\(exportkit_request\), got"):
            ask_with_one_changed(copies, lambda request, size=size: setattr(request, "size", size))
    asks, answers = [Ask(every_dtype(1))], Gathered()
    for call, code, message in (
        (lambda: run_requests(copies, asks, -1, answers=answers), USAGE, "most must not be negative, got -1"),
        (lambda: run_requests(copies, asks, 4, "push", answers), USAGE, "no method 'push'"),
        (lambda: run_requests(copies, asks, flags=1, answers=answers), USAGE, "exportkit_run_options.flags has flags"),
        (lambda: run_requests(copies, asks, stream=8, answers=answers), USAGE, "stream must be null"),
        (lambda: run_requests(c_interface.Model(copies.library, 99), asks), CLOSED, "handle 99"),
    ):
        with pytest.raises(Refused) as error:
            call()
        assert error.value.code == code
        assert message in error.value.message
    assert answers.ended == []
    library, none = copies.library, c.POINTER(c.POINTER(Request))()
    arguments = (none, 0, 4, c.byref(answers.c), None)
    library.call("run_requests", copies.handle, None, *arguments)  # of nobody
    for place, value, message in (
        (1, 2, "requests must not be null"),
        (3, None, "answers must not be null"),
        (3, c.byref(Answers(c.sizeof(Answers))), "place must not be null"),
        (3, c.byref(Answers(31)), "exportkit_answers.size must be"),
        (4, c.byref(RunOptions(5)), "exportkit_run_options.size must be"),
    ):
        wrong = list(arguments)
        wrong[place] = value
        with pytest.raises(Refused, match=message):
            library.call("run_requests", copies.handle, None, *wrong)
    nothing = (c.POINTER(Request) * 1)()
    with pytest.raises(Refused, match=r"requests\[0\] must not be null"):
        library.call("run_requests", copies.handle, None, nothing, 1, 4, c.byref(answers.c), None)


def test_a_newer_callers_members_must_be_zero(copies):
    class Newer(c.Structure):
        _fields_ = (("known", Request), ("added", c.c_int64))

    for added, code in ((0, 0), (1, USAGE)):
        ask = Ask(every_dtype(1))
        newer = Newer(ask.c(), added)
        newer.known.size = c.sizeof(Newer)
        pointers = (c.POINTER(Request) * 1)(c.pointer(newer.known))
        answers = Gathered()
        copies.library.call("run_requests", copies.handle, None, pointers, 1, 0, c.byref(answers.c), None)
        assert answers.ended == [0]
        error = newer.known.error
        assert (copies.library.taken(c.c_void_p(error)).code if error else 0) == code


def test_ended_may_be_null_and_an_input_may_have_no_pieces_where_it_has_no_bytes(copies):
    ask = Ask(every_dtype(0))
    request = ask.c()
    for place in range(len(ask.inputs)):
        cut(request, place, piece_count=0, pieces=c.POINTER(Piece)())
    answers = Gathered()
    silent = Answers(c.sizeof(Answers), answers.c.place)
    pointers = (c.POINTER(Request) * 1)(c.pointer(request))
    copies.library.call("run_requests", copies.handle, None, pointers, 1, 0, c.byref(silent), None)
    assert request.error is None
    assert equal([answers.outputs[0, place] for place in range(len(ask.inputs))], ask.inputs)


def test_a_method_that_writes_into_an_input_takes_no_requests(c_library, recorder_package):
    with (
        c_library.open(recorder_package) as model,
        pytest.raises(Refused, match="writes into its input `out`") as error,
    ):
        run_requests(model, [], method="fill")
    assert error.value.code == USAGE
