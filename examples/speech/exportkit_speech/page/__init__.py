"""The part of the server's page that listens to the microphone, for models that hear speech in 512 samples."""

from pathlib import Path
from typing import Any

from exportkit.package.manifest import Call, Size

STATIC = Path(__file__).with_name("static")
SAMPLES = 512


def recognise(call: Call) -> dict[str, Any] | None:
    """Returns what the input is called, and how many samples it takes; None for another model.

    It takes float32 [streams, 512], and answers float32 [streams]; one stream must be enough.
    """
    if len(call.inputs) != 1 or len(call.outputs) != 1:
        return None
    (given,), (answer,) = call.inputs, call.outputs
    one = {dimension.name for dimension in call.dimensions if dimension.min == 1}
    if (given.name, given.dtype, answer.dtype) != ("chunk", "float32", "float32") or len(given.shape) != 2:
        return None
    streams = given.shape[0]
    alone = streams == 1 or (isinstance(streams, Size) and streams.dimension in one)
    if not alone or given.shape[1] != SAMPLES or answer.shape != (streams,):
        return None
    return {"input": given.name, "samples": SAMPLES}
