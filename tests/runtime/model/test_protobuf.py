"""Protobuf's messages of Triton's protocol, beside those of Triton's own client."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import moonpool
from moonpool.runtime.model.protobuf import Messages, config_messages, described_files, service_messages

SOURCE = Path(moonpool.__path__[0]).parent
# Packages of Triton's client, and those that it needs beside what moonpool does.
BLOCKED = """
import sys
for name in ("tritonclient", "grpc", "rapidjson", "ml_dtypes"):
    sys.modules[name] = None
"""
USES = """
from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.server.grpc import infer_request, infer_response, methods, reflection, server
from moonpool.runtime.model.protobuf import service_messages
print(pbtxt.parse('max_batch_size: 3 input { name: "X" data_type: TYPE_FP32 dims: 1 }', "config.pbtxt")[0]["input"][0]["name"])
print(service_messages().ModelInferRequest(model_name="m").SerializeToString().hex())
"""


def described(file: Any) -> Any:
    """Return what a file describes, in an order that does not depend on where in it something is written."""
    found = descriptor_pb2.FileDescriptorProto()
    file.DESCRIPTOR.CopyToProto(found)
    for service in found.service:
        service.method.sort(key=lambda each: each.name)
        for method in service.method:
            method.ClearField("options")
    _sort(found.message_type)
    return found


def _sort(messages: Any) -> None:
    messages.sort(key=lambda each: each.name)
    for message in messages:
        message.enum_type.sort(key=lambda each: each.name)
        for field in message.field:
            field.ClearField("json_name")
        _sort(message.nested_type)


@pytest.mark.promise(
    "The package",
    "moonpool brings the messages of Triton's protocol along. Each field has the number, the type and the group that "
    "it has in Triton's own client, which need not be installed.",
)
@pytest.mark.parametrize("file", ["model_config", "service"])
def test_each_field_is_that_of_tritons_client(file: str) -> None:
    theirs = pytest.importorskip(f"tritonclient.grpc.{file}_pb2")
    mine = config_messages() if file == "model_config" else service_messages()

    assert described(mine) == described(theirs)


@pytest.mark.promise("The package", "moonpool brings the messages of …")
def test_nothing_of_tritons_client_is_needed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED + USES],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.stdout.split() == ["X", "0a016d"], ended.stderr


def test_a_message_that_does_not_exist_is_named() -> None:
    with pytest.raises(AttributeError, match=r"grpc_service\.proto has no message ModelInfer$"):
        service_messages().ModelInfer  # noqa: B018 - it raises


def test_a_thread_waits_for_a_class_that_another_one_still_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = described_files()[0]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(config)
    messages = Messages(pool, config.name)
    order = []
    other = threading.Thread(target=lambda: order.append(messages.ModelConfig and "other"))
    make = message_factory.GetMessageClass

    def slowly(descriptor: Any) -> Any:
        # It calls itself for the messages inside.
        if other.ident is None:
            other.start()
            # Without a lock, the other thread is quicker.
            other.join(0.2)
            order.append("made")
        return make(descriptor)

    monkeypatch.setattr(message_factory, "GetMessageClass", slowly)
    assert messages.ModelConfig
    other.join(30)
    assert order == ["made", "other"]
