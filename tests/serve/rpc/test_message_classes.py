"""The messages are those that clients know."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from tritonclient.grpc import model_config_pb2, service_pb2

from exportkit.serve.rpc.message_classes import INFERENCE, message_class, methods
from tools import rpc_descriptors

THEIRS = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}
OURS = message_class("inference.ModelInferRequest").DESCRIPTOR.file


def described(messages: Any, enums: Any) -> dict[str, Any]:
    """Everything about fields and enumerations, also of messages within messages, that a client sees."""
    found: dict[str, Any] = {each.full_name: {value.name: value.number for value in each.values} for each in enums}
    for message in messages:
        for field in message.fields:
            kind = (field.message_type or field.enum_type).full_name if field.message_type or field.enum_type else ""
            oneof = field.containing_oneof.name if field.containing_oneof else ""
            found[field.full_name] = (field.number, field.type, field.is_repeated, field.is_packed, kind, oneof)
        found |= described(message.nested_types, message.enum_types)
    return found


def test_every_field_and_enumeration_is_the_one_that_tritonclient_knows():
    ours = described(OURS.message_types_by_name.values(), OURS.enum_types_by_name.values())
    theirs = described(THEIRS.values(), model_config_pb2.DESCRIPTOR.enum_types_by_name.values())
    assert len(ours) > 150  # there were some
    assert {name: (told, theirs.get(name)) for name, told in ours.items() if told != theirs.get(name)} == {}


def test_what_a_client_may_send_is_known_entirely():
    for name, ours in OURS.message_types_by_name.items():
        if name.startswith("Infer") or name.endswith("Request"):
            assert {f.name for f in ours.fields} == {f.name for f in THEIRS[name].fields}, name


def test_every_method_takes_and_returns_what_tritonclient_sends_and_expects():
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    for name, (takes, returns) in methods(INFERENCE).items():
        assert takes.DESCRIPTOR.full_name == theirs[name].input_type.full_name
        assert returns.DESCRIPTOR.full_name == theirs[name].output_type.full_name
        assert theirs[name].client_streaming == theirs[name].server_streaming == (name == "ModelStreamInfer")


def test_the_descriptor_set_is_that_of_the_proto_files():
    assert rpc_descriptors.descriptor_set() == rpc_descriptors.WRITTEN.read_bytes()


def test_the_classes_of_messages_within_messages_stay() -> None:
    message = message_class("inference.ModelInferRequest")()
    message.parameters["x"].int64_param = 1
    kind = weakref.ref(type(message.parameters["x"]))
    del message
    gc.collect()
    assert kind() is not None
