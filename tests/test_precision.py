"""float32 is computed with the digits that a recording asks for, whatever a model or a caller set before."""

from __future__ import annotations

import msgspec
import pytest
import torch

from exportkit import ExportSpec
from exportkit.errors import UsageError
from exportkit.export.artifact import export_program
from exportkit.export.export_options import TraceOptions
from exportkit.export.models.resolve import resolve
from exportkit.export.record.cases import eager_mode
from exportkit.export.record.eager_methods import DescribedModel, EagerMethods
from exportkit.export.record.eager_run import run_eagerly
from exportkit.export.record.record import record_run
from exportkit.export.record.sequences import DrawnCall
from exportkit.package.archive import PackageReader
from exportkit.precision import Float32Precision, allow_tf32, with_tf32
from exportkit.runtime.isolated_messages import TorchSettings
from tests.runtime import tiny

BACKENDS = torch.backends
SETTINGS = {
    "nothing": lambda: None,
    "everything in TF32": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "everything in full": lambda: setattr(BACKENDS, "fp32_precision", "ieee"),
    "products in TF32": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "convolutions in full": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
    "all of cuDNN in TF32": lambda: setattr(BACKENDS.cudnn, "fp32_precision", "tf32"),
    "the CPU in bfloat16": lambda: setattr(BACKENDS.mkldnn, "fp32_precision", "bf16"),
    "products high": lambda: torch.set_float32_matmul_precision("high"),
    "products medium": lambda: torch.set_float32_matmul_precision("medium"),
    "products in TF32, the older way": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
}


@pytest.fixture(autouse=True)
def settings_of_torch():
    before = Float32Precision.current()
    yield
    allow_tf32(False)
    before.apply()
    assert Float32Precision.current() == before


@pytest.fixture(params=SETTINGS)
def already_set(request):
    """torch's older interface refuses to answer after some of these."""
    SETTINGS[request.param]()


def reads() -> tuple[bool, bool, str]:
    """What the compiler asks torch."""
    return BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32, torch.get_float32_matmul_precision()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_recording_uses_tf32_if_it_is_to_and_leaves_the_settings_as_they_were(already_set, allowed):
    before = Float32Precision.current()
    with eager_mode(tf32=allowed):
        assert reads() == (allowed, allowed, "high" if allowed else "highest")
        inside = Float32Precision.current()
        rounds = {precision for place, precision in inside.places.items() if precision not in ("none", "ieee")}
        assert rounds == ({"tf32"} if allowed else set())
    assert Float32Precision.current().places == before.places


def test_the_worker_of_an_isolated_model_computes_like_the_process_that_loads_it(already_set):
    here = msgspec.json.encode(TorchSettings.current())
    allow_tf32(False)
    msgspec.json.decode(here, type=TorchSettings).apply()
    assert msgspec.json.decode(here, type=TorchSettings).precision.places == Float32Precision.current().places


class Watched(torch.nn.Module):
    """Remembers what it may use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a product."""
        self.seen.append(BACKENDS.cuda.matmul.allow_tf32)
        return self.linear(x)


def test_a_reference_never_uses_tf32():
    model = Watched().eval()
    eager = EagerMethods(ExportSpec(model=model, example_inputs=(torch.rand(3, 2),)))
    bound = eager.bind("forward", (torch.rand(3, 2),), {})
    (method,) = tiny.forward(tiny.tensors_call({"x": ("float32", (3, 2))}, ("float32", (3, 2))))
    with with_tf32(True):
        for tf32 in (False, True):
            model.seen.clear()
            case = record_run(
                run_eagerly(DescribedModel(eager, [method], tf32=tf32), [DrawnCall("forward", bound, {})])
            )
            assert case.calls[0].accuracy.keys() == {"0"}
            assert model.seen == [tf32, False]


def test_an_artifact_says_whether_eager_was_allowed_tf32_and_recorded_cases_keep_it(tmp_path):
    words = {"model_kwargs": {"in_features": 2, "out_features": 2}, "inputs": ["input=float32[3,2]"]}
    plain, allowed, again = (tmp_path / f"{name}.pt2" for name in ("plain", "allowed", "again"))
    for path, tf32 in ((plain, False), (allowed, True)):
        export_program(resolve("torch.nn:Linear", **words), path, TraceOptions(cases=1, tf32=tf32))
    with pytest.raises(UsageError, match="were recorded without TF32"):
        export_program(resolve(str(plain)), again, TraceOptions(tf32=True))
    assert not again.exists()
    export_program(resolve(str(allowed)), again, TraceOptions())
    for path, tf32 in ((plain, False), (allowed, True), (again, True)):
        with PackageReader(path) as reader:
            assert reader.manifest.provenance.tf32 is tf32
