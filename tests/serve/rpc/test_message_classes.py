"""The messages are those that clients know."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2, service_pb2

from exportkit.serve.rpc.message_classes import INFERENCE, message_class, methods
from tools import rpc_descriptors

THEIRS = {**service_pb2.DESCRIPTOR.message_types_by_name, **model_config_pb2.DESCRIPTOR.message_types_by_name}
OURS = message_class("inference.ModelInferRequest").DESCRIPTOR.file


def shape_of(field: FieldDescriptor) -> tuple[Any, ...]:
    """Everything about a field that a client sees on the wire or by name."""
    kind = field.message_type.full_name if field.message_type else field.enum_type.full_name if field.enum_type else ""
    oneof = field.containing_oneof.name if field.containing_oneof else ""
    return field.number, field.type, field.is_repeated, field.is_packed, kind, oneof


def compare(ours: Any, theirs: Any) -> int:
    """Compares a message with a client's and returns the number of fields."""
    for field in ours.fields:
        assert shape_of(field) == shape_of(theirs.fields_by_name[field.name]), field.full_name
    for enum in ours.enum_types:
        compare_enums(enum, theirs.enum_types_by_name[enum.name])
    nested = [compare(inner, theirs.nested_types_by_name[inner.name]) for inner in ours.nested_types]
    return len(ours.fields) + sum(nested)


def compare_enums(ours: EnumDescriptor, theirs: EnumDescriptor) -> None:
    assert {v.name: v.number for v in ours.values} == {v.name: v.number for v in theirs.values}


def test_every_field_and_enumeration_is_the_one_that_tritonclient_knows():
    compared = [compare(ours, THEIRS[name]) for name, ours in OURS.message_types_by_name.items()]
    assert sum(compared) > 150  # there were some
    for name, ours in OURS.enum_types_by_name.items():
        compare_enums(ours, model_config_pb2.DESCRIPTOR.enum_types_by_name[name])


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


@pytest.mark.process
def test_the_descriptor_set_is_that_of_the_proto_files():
    assert rpc_descriptors.descriptor_set() == rpc_descriptors.WRITTEN.read_bytes()


def test_the_classes_of_messages_within_messages_stay() -> None:
    message = message_class("inference.ModelInferRequest")()
    message.parameters["x"].int64_param = 1
    kind = weakref.ref(type(message.parameters["x"]))
    del message
    gc.collect()
    assert kind() is not None
