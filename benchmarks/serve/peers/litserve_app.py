"""A package behind LitServe: POST /predict takes and returns bytes. It batches what waits, over ZeroMQ.

python -m benchmarks.serve.peers.litserve_app model.pt2 --sizes batch=1,gh=32,gw=32 --max-batch 8
"""
# No `from __future__ import annotations`: FastAPI reads the annotation of `decode_request`, and needs the value.

from typing import Annotated, Any

import litserve
import torch
from fastapi import Body, Response

from benchmarks.serve.peers.called import Called, Options, answer


class Api(litserve.LitAPI):
    def __init__(self, options: Options) -> None:
        super().__init__(max_batch_size=options.max_batch, batch_timeout=0.0)
        self.options = options

    def setup(self, device: Any) -> None:
        self.called = Called(self.options)

    def decode_request(
        self, request: Annotated[bytes, Body(media_type="application/octet-stream")]
    ) -> list[torch.Tensor]:
        return self.called.inputs(request)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, x: Any) -> Any:
        return self.called.outputs(x) if self.options.max_batch == 1 else self.called.together(x)

    def unbatch(self, output: Any) -> Any:
        return output

    def encode_response(self, output: list[torch.Tensor]) -> Response:
        return Response(answer(output), media_type="application/octet-stream")


if __name__ == "__main__":
    options = Options.parse(__doc__)
    server = litserve.LitServer(Api(options), accelerator="cpu", workers_per_device=1, timeout=False, fast_queue=True)
    server.run(port=options.port, host="127.0.0.1", generate_client_file=False, log_level="error", num_api_servers=1)
