"""The messages of open_inference.proto and grpc_health.proto, in a descriptor pool that nothing else sees.

The generated modules of tritonclient and of kserve register the package `inference` in protobuf's default pool, which
allows every name once in a process. Ours never enters it, so that a process can be a server and a client.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from exportkit.serve.statuses import BadRequestError

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

_DESCRIPTORS = Path(__file__).with_name("messages.binpb")  # of the .proto files, by `python -m tools.rpc_descriptors`


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(_DESCRIPTORS.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


@cache
def _classes() -> list[Any]:
    """Returns the classes of all messages, also of those within others.

    protobuf makes the class of an inner message when it first comes, Python's collector takes it away when there is no
    such message, and so on. Kept, they are made once, and no thread reads a message while its class goes.
    """
    pool, found = _pool(), []
    for file in descriptor_pb2.FileDescriptorSet.FromString(_DESCRIPTORS.read_bytes()).file:
        left = list(pool.FindFileByName(file.name).message_types_by_name.values())
        while left:
            found.append(message_factory.GetMessageClass(described := left.pop()))
            left += described.nested_types
    return found


@cache
def message_class(name: str) -> Any:
    """Returns the class of a message, by its full name: `inference.ModelInferRequest`."""
    _classes()
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(name))


@cache
def methods(service: str) -> dict[str, tuple[Any, Any]]:
    """Returns the classes of the request and of the response of each method of a service."""
    found = _pool().FindServiceByName(service).methods
    return {m.name: (message_class(m.input_type.full_name), message_class(m.output_type.full_name)) for m in found}


def read_message(kind: Any, data: bytes | bytearray) -> Any:
    """Parses a message.

    Raises:
        BadRequestError: The bytes are not such a message.
    """
    try:
        return kind.FromString(bytes(data))
    except message.DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise BadRequestError(f"the request's {len(data)} bytes are not a message {name}") from None
