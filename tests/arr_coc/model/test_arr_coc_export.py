"""The whole model through torch.compile and torch.export, with batch, height and width as they come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import ExportedProgram

from exportkit.arr_coc.model import export_spec, features_spec
from exportkit.errors import UsageError
from exportkit.export.trace.trace_method import trace_with_torch_export
from exportkit.spec import ExportSpec
from tests.arr_coc.model.model_cases import ALL, shallow
from tests.export.function_models import tracing_task

pytestmark = pytest.mark.usefixtures("two_blocks")

SIZES = [(1, 4, 4), (3, 16, 5), (2, 15, 17), (1, 20, 20), (2, 4, 64)]  # fewer and more patches than K, the range's ends
CONFIGS = [
    pytest.param(partial(export_spec, **kwargs, query_tokens=tokens), id=f"{name}, {'tokens' if tokens else 'vector'}")
    for (name, kwargs), tokens in zip(ALL.items(), (False, True, False, True))
]
FEATURES = pytest.param(partial(features_spec, dim=24, patch_size=8, feature_dtype="int8", k=30), id="int8 features")


def _drawn(spec: ExportSpec, batch: int, rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    sizes = {"batch": batch, "gh": rows, "gw": columns, "tokens": 3}
    args, kwargs = spec.draw_inputs(sizes, torch.Generator().manual_seed(1))
    assert not kwargs
    return args


def _exported(spec: ExportSpec) -> ExportedProgram:
    with torch.no_grad():
        return trace_with_torch_export(*tracing_task(spec))[0]


@pytest.mark.slow_but("vit, vector")
@pytest.mark.parametrize("make", [*CONFIGS, FEATURES])
def test_the_exported_program_answers_as_eager_does_at_every_size(make: Callable[[], ExportSpec]):
    spec = make()
    module = _exported(spec).module()
    for size in SIZES:
        args = _drawn(spec, *size)
        with torch.no_grad():
            expected, outputs = spec.model(*args), module(*args)
        assert list(outputs) == list(expected)
        assert all(torch.equal(outputs[name], expected[name]) for name in expected), size
    assert set(spec.tolerances) <= set(expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [CONFIGS[0], CONFIGS[3]])
def test_it_compiles_as_one_graph_that_serves_every_size(make: Callable[[], ExportSpec]):
    torch._dynamo.reset()
    spec = make()
    shallow(spec.model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, traced = torch.compile(spec.model, fullgraph=True, dynamic=True, backend=counter), []
    for size in [(2, 15, 17), (3, 16, 5), (2, 4, 64)]:  # not 3 first, which would be taken for the number of channels
        args = _drawn(spec, *size)
        with torch.no_grad():
            expected, outputs = spec.model(*args), compiled(*args)
        torch.testing.assert_close(outputs["relevance"], expected["relevance"], rtol=1e-4, atol=1e-5)
        traced.append(counter.frame_count)
    assert len(set(traced)) == 1  # once, for the first size
    torch._dynamo.reset()


# --- the spec ---------------------------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_weights_and_leave_the_random_state():
    before = torch.get_rng_state()
    first, second = (export_spec(encoder="vit-tiny", balancer="learned", seed=3) for _ in range(2))
    other = export_spec(encoder="vit-tiny", balancer="learned", seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    state = first.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in second.model.state_dict().items())
    assert not torch.equal(state["encoder.cls_token"], other.model.state_dict()["encoder.cls_token"])


def test_tolerances_of_outputs_that_are_ranked_say_by_what():
    spec = export_spec()
    assert spec.tolerances["indices"].ranking_of == "relevance"
    assert spec.tolerances["features"].rows_of == "indices"
    assert spec.tolerances["positions"].rows_of == "indices"


def test_drawn_inputs_depend_on_the_generator_alone_and_look_like_images():
    spec = export_spec()
    first, second = _drawn(spec, 2, 3, 5), _drawn(spec, 2, 3, 5)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    image = first[0]
    assert tuple(image.shape) == (2, 3, 48, 80)
    assert image.min() >= 0
    assert image.max() <= 1
    assert not torch.equal(image[0], image[1])


def test_unknown_arguments_are_refused_with_those_there_are():
    with pytest.raises(UsageError, match=r"arr-coc takes no kk\n  It takes query_tokens, encoder, patch_size, dim, k"):
        export_spec(kk=3)
    with pytest.raises(UsageError, match=r"arr-coc takes no query_tokens\n  It takes encoder, patch_size, dim, k"):
        features_spec(query_tokens=True)


def test_an_encoder_and_given_features_are_two_models_each_named_by_the_other():
    with pytest.raises(UsageError, match=r"needs an encoder other than given\n.*exportkit.arr_coc.model:features_spec"):
        export_spec(encoder="given", dim=8)
    with pytest.raises(UsageError, match=r"takes no encoder: features are an input\n  Use arr-coc"):
        features_spec(encoder="filters")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("k", "200", "int"), ("gamma", "2", "float"), ("encoder", 3, "str"), ("k", True, "int")],
)
def test_arguments_of_another_type_are_refused(name: str, value: Any, allowed: str):
    with pytest.raises(UsageError, match=f"{name} must be .*{allowed}.*, got {value!r}"):
        export_spec(**{name: value})
