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

# A field of two bytes takes a hundred in memory. So what is no tensor has a bound, as HTTP's JSON does.
_MOST_FIELDS = 4096
_MOST_BYTES = 16 << 20
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # https://protobuf.dev/programming-guides/encoding

_DESCRIPTORS = Path(__file__).with_name("messages.binpb")  # of the .proto files, by `python -m tools.rpc_descriptors`


@cache
def _loaded() -> tuple[descriptor_pool.DescriptorPool, list[Any]]:
    """Returns the descriptors and the classes of all messages, also of those within others.

    protobuf makes the class of an inner message when it first comes, Python's collector takes it away when there is no
    such message, and so on. Kept, they are made once, and no thread reads a message while its class goes.
    """
    pool, left = descriptor_pool.DescriptorPool(), []
    for file in descriptor_pb2.FileDescriptorSet.FromString(_DESCRIPTORS.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
        left += pool.FindFileByName(file.name).message_types_by_name.values()
    for described in left:
        left += described.nested_types
    return pool, [message_factory.GetMessageClass(described) for described in left]


@cache
def message_class(name: str) -> Any:
    """Returns the class of a message, by its full name: `inference.ModelInferRequest`."""
    return message_factory.GetMessageClass(_loaded()[0].FindMessageTypeByName(name))


@cache
def methods(service: str) -> dict[str, tuple[Any, Any]]:
    """Returns the classes of the request and of the response of each method of a service."""
    found = _loaded()[0].FindServiceByName(service).methods
    return {m.name: (message_class(m.input_type.full_name), message_class(m.output_type.full_name)) for m in found}


def read_message(kind: Any, data: bytes, tensors: int = 0) -> Any:
    """Parses a message.

    Args:
        kind: The message's class.
        data: Its bytes.
        tensors: The number of the field that holds tensors. 0: there is none.

    Raises:
        BadRequestError: The bytes are not such a message, or it has too many fields or bytes beside its tensors.
    """
    _check_bounds(data, tensors)
    try:
        return kind.FromString(data)
    except message.DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise BadRequestError(f"the request's {len(data)} bytes are not a message {name}") from None


def _check_bounds(data: bytes, tensors: int) -> None:
    """Refuses a message that would become too many objects. Whether it is one is for protobuf to say."""
    at = fields = of_tensors = 0
    while at < len(data):
        fields += 1
        if fields > _MOST_FIELDS:
            raise BadRequestError(f"the message has more than {_MOST_FIELDS} fields")
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _LENGTH:
            size, at = _varint(data, at)
            at += size
            of_tensors += size if tag >> 3 == tensors else 0
        elif kind == _VARINT:
            _, at = _varint(data, at)
        else:
            at += {_FIXED64: 8, _FIXED32: 4}.get(kind, 0)
    if len(data) - of_tensors > _MOST_BYTES:
        raise BadRequestError(
            f"the message has more than {_MOST_BYTES} bytes beside `raw_input_contents`",
            hint="Send the elements of large inputs there.",
        )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number, and where it ends. One that does not end is for protobuf to refuse."""
    value = 0
    for place, byte in enumerate(data[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return 0, len(data)
