"""A runtime, a service and its gRPC server, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import grpc
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

import moonpool
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.server import GrpcServer
from moonpool.runtime.server.service import Service

TIMEOUT_S = 60.0
ROOT = Path(__file__).parent.parent.parent.parent
EXAMPLES = ROOT / "examples" / "models"
MODELS = ROOT / "tests" / "models" / "grpc"
messages: ModuleType = kserve


class Served:
    """Started by its constructor. `close` ends everything, the clients too."""

    def __init__(self, models: Sequence[str], options: GrpcOptions) -> None:
        self.runtime = moonpool.Runtime()
        self._channels: list[grpc.Channel] = []
        self._clients: list[triton.InferenceServerClient] = []
        for name in models:
            folder = MODELS / name if (MODELS / name).is_dir() else EXAMPLES / name
            self.runtime.load(name, folder)
        self.service = Service(self.runtime)
        self.server = GrpcServer(self.service, options)
        self.server.start()
        self.address = f"127.0.0.1:{self.server.port}"

    def client(self) -> triton.InferenceServerClient:
        """Return a client of Triton's."""
        client = triton.InferenceServerClient(self.address)
        self._clients.append(client)
        return client

    def channel(self, *options: tuple[str, object]) -> grpc.Channel:
        """Return a channel of gRPC's with a connection of its own."""
        own = ("grpc.use_local_subchannel_pool", 1)
        channel = grpc.insecure_channel(self.address, [own, *options])
        self._channels.append(channel)
        return channel

    def stub(self) -> GRPCInferenceServiceStub:
        """Return the methods of the service as functions."""
        return GRPCInferenceServiceStub(self.channel())

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for channel in self._channels:
            channel.close()
        self.server.close()
        self.runtime.close()
