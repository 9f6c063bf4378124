"""Brings the steps of a sequence to the replica that has its state, on Ray Serve.

Which replica that is, Ray's ConsistentHashRouter says, by the request's header `x-session-id`. HAProxy cannot run it:
before each POST it asks another deployment, SequenceRouter, and then sends the request straight to the replica. Ray
calls this hook internal; its own serving of language models uses it. Without HAProxy, Ray's proxies run the router
themselves. Decision 0049 says what else was tried.
"""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, SERVE_SESSION_ID
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from exportkit.errors import HostError
from exportkit.serve.protocol.parameters import SEQUENCE_ID

ROUTER = "exportkit-router"  # the deployment that HAProxy asks


def with_sequences(deployment: serve.Deployment) -> serve.Deployment:
    """Returns a deployment whose requests go where their header says.

    Raises:
        HostError: This cluster reads another header.
    """
    if SERVE_SESSION_ID.lower() != SEQUENCE_ID:
        raise HostError(
            f"Ray reads the sequence's id from the header {SERVE_SESSION_ID}, and clients send {SEQUENCE_ID}",
            hint="Unset RAY_SERVE_SESSION_ID_HEADER_KEY on every node.",
        )
    settings: dict[str, Any] = {  # Ray's annotations want a class, and its documents a text
        "request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
        # Another replica has no state: a step waits for its own one.
        "request_router_kwargs": {"num_fallback_replicas": 0},
    }
    return deployment.options(request_router_config=RequestRouterConfig(**settings))


def behind_router(application: serve.Application) -> serve.Application:
    """Lets HAProxy ask a router before each POST to the application, where the cluster has HAProxy."""
    if not RAY_SERVE_ENABLE_HA_PROXY:
        return application
    return application._with_ingress_request_router(SequenceRouter.bind(application))  # type: ignore[attr-defined]


@serve.deployment(
    name=ROUTER,
    max_ongoing_requests=1024,
    ray_actor_options={"num_cpus": 0},
)
@serve.ingress()
class SequenceRouter:
    """Says which replica gets a request: HAProxy sends `POST /internal/route` with the header of the sequence.

    Ray runs three of them on each node with a proxy.
    """

    def __init__(self, replicas: DeploymentHandle) -> None:
        """The handle runs the router of the replicas' deployment."""
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns what answers HAProxy."""
        header = SEQUENCE_ID.encode()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                while (kind := (await receive())["type"]) != "lifespan.shutdown":
                    await send({"type": f"{kind}.complete"})
                return await send({"type": "lifespan.shutdown.complete"})
            session = dict(scope["headers"]).get(header, b"").decode("latin-1")
            try:
                status, found = 200, {"replica_id": await self._replica(session)}
            except (DeploymentUnavailableError, RuntimeError) as error:
                status, found = 503, {"error": str(error)}
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": msgspec.json.encode(found)})

        return answer

    async def _replica(self, session: str) -> str:
        handle = self._replicas.options(session_id=session) if session else self._replicas
        # Nothing is reserved: the request comes through HAProxy, and not through this handle.
        async with handle.choose_replica(_reserve=False) as selection:
            return str(selection._replica.replica_id.to_full_id_str())
