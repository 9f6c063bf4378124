"""A package behind Ray Serve as its guide begins: one replica, the HTTP proxy, @serve.batch, POST /predict.

python -m benchmarks.serve.peers.ray_plain model.pt2 --sizes batch=1,gh=32,gw=32 --max-batch 8
"""
# Annotations stay values here: Ray pickles the class by value.

import asyncio

import ray
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.serve.peers.called import Called, Options, answer

options = Options.parse(__doc__)


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
class Api:
    def __init__(self, given: Options) -> None:
        self.called = Called(given)
        self.batched = given.max_batch > 1
        self.together.set_max_batch_size(given.max_batch)

    @serve.batch(batch_wait_timeout_s=0.0)
    async def together(self, requests: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return await asyncio.to_thread(self.called.together, requests)

    async def __call__(self, request: Request) -> Response:
        inputs = self.called.inputs(await request.body())
        run = self.together(inputs) if self.batched else asyncio.to_thread(self.called.outputs, inputs)
        return Response(answer(await run), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    serve.run(Api.bind(options), route_prefix="/predict", blocking=True)
