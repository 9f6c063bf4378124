"""A package behind KServe's SDK, which speaks the Open Inference Protocol and does not batch.

python -m benchmarks.serve.peers.kserve_app model.pt2 --sizes batch=1,gh=32,gw=32
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import kserve
import torch
from kserve.utils.numpy_codec import from_np_dtype

from benchmarks.serve.peers.called import Called, Options


class Api(kserve.Model):
    def __init__(self, called: Called) -> None:
        super().__init__(called.request.model)
        self.called = called
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> kserve.InferResponse:
        inputs = [torch.from_numpy(tensor.as_numpy().copy()) for tensor in payload.inputs]
        found = []
        for described, output in zip(self.called.model.manifest.call.outputs, self.called.outputs(inputs)):
            array = output.numpy()
            one = kserve.InferOutput(described.name, list(array.shape), from_np_dtype(array.dtype))
            one.set_data_from_numpy(array)
            found.append(one)
        return kserve.InferResponse(payload.id, self.name, found, use_binary_outputs=True)


if __name__ == "__main__":
    options = Options.parse(__doc__)
    del sys.argv[1:]  # the SDK reads it, too
    server = kserve.ModelServer(
        http_port=options.port, enable_grpc=False, workers=1, enable_latency_logging=False, access_log_format=None
    )
    for name in ("uvicorn.access", "kserve.trace"):  # the others write no access log either
        logging.getLogger(name).disabled = True
    server.start([Api(Called(options))])
