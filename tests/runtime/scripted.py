"""A link, and a peer over a real socket that sends what the test wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.runtime.recorder import tensor

from moonpool import OutOfMemory, Response
from moonpool.ipc.arena import Arena
from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode, unpack_layout
from moonpool.ipc.conversation import Conversation, Overflow
from moonpool.ipc.messages import NO_CORE, PROTOCOL_VERSION, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.ipc.tensors import CODES
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.link import Link
from moonpool.runtime.stubs.regions import CallerMemory

KiB = 1024
FP32, BYTES = CODES["FP32"], CODES["BYTES"]
Row = list[Any]


class Peer(Overflow):
    """A stub that does nothing by itself. Both ends are in this process and share the objects of regions."""

    def __init__(self, end: Any) -> None:
        self.channel = Channel(end)
        self.conversation = Conversation(self.channel, Side.STUB, self)
        self.regions: dict[int, SharedRegion] = {}
        self.forgotten: list[int] = []
        self.arena = Arena(self._grow)
        self.batch = 0
        self.released: list[list[int]] = []
        self.blocks: list[list[int]] = []
        self.rows: list[list[Row]] = []
        self.details: list[Any] | None = None
        self.targets: list[list[int]] | None = None

    def announce(self, region: SharedRegion, writer: Side) -> None:
        self.regions[region.id] = region
        if writer is Side.STUB:
            self.arena.add(region)

    def forget(self, region_id: int) -> None:
        self.forgotten.append(region_id)

    def _grow(self, _: int) -> SharedRegion:
        raise OutOfMemory("the peer has no more")

    def receive(self) -> None:
        """Read an EXECUTE."""
        message = self.conversation.receive()
        assert message[0] == Kind.EXECUTE
        _, self.batch, _, self.released, self.blocks, packed, self.details, self.targets = message
        self.rows = unpack_layout(packed)

    def input(self, request: int, number: int) -> np.ndarray[Any, Any]:
        """Return the values at the place of an FP32 input."""
        _, _, shape, block, offset, _ = self.rows[request][number]
        region, start, _ = self.blocks[block]
        return np.ndarray(shape, np.float32, self.regions[region].buffer, start + offset)

    def place(self, values: Sequence[float]) -> list[int]:
        """Make a block with these values, for an answer."""
        data = np.array(values, np.float32)
        block = self.arena.allocate(data.nbytes)
        np.ndarray(data.shape, data.dtype, block.region.buffer, block.offset)[...] = data
        return [block.region.id, block.offset, data.nbytes]

    def answer(
        self,
        blocks: Sequence[list[int]] = (),
        rows: Sequence[Sequence[Row]] = ((),),
        *,
        held: Sequence[list[int]] = (),
        released: Sequence[list[int]] = (),
        remarks: Any = None,
        batch: int | None = None,
        core: int = NO_CORE,
    ) -> None:
        number = self.batch if batch is None else batch
        self.conversation.send(
            Kind.ANSWER, number, core, held, released, blocks, encode(*map(list, rows)), remarks, None
        )

    def store(self, packet: bytes) -> tuple[int, int, int]:
        block = self.arena.allocate(len(packet))
        block.region.memory()[block.offset : block.offset + len(packet)] = packet
        return block.region.id, block.offset, len(packet)

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        return bytes(self.regions[region].memory()[offset : offset + size_bytes])


class Pair:
    """Make a link and its peer, in the state after LOADED."""

    def __init__(self, *, limit: int | None = None, region_bytes: int = 64 * KiB, is_private: bool = False) -> None:
        ours, theirs = Channel.pair()
        self.peer = Peer(theirs)
        self.memory = CallerMemory(None)
        self.link = Link(
            ours,
            self.peer.announce,
            self.peer.forget,
            region_bytes=region_bytes,
            requests=Allotment(limit, is_contained=False),
            answers=Allotment(limit, is_contained=False),
            is_private=is_private,
        )
        self.peer.conversation.send(Kind.CONFINED, PROTOCOL_VERSION, [], [])
        self.link.conversation.receive()
        self.link.conversation.send(Kind.START, "{}")
        self.peer.conversation.receive()
        self.peer.conversation.send(Kind.LOADED, {})
        self.link.conversation.receive()
        config = ModelConfig.from_dict(
            {
                "name": "m",
                "backend": "any",
                "input": [tensor("X", "FP32", -1)],
                "output": [tensor("Y", "FP32", -1), tensor("Z", "FP32", -1)],
            }
        )
        self.link.serve(config, self.memory)
        self._signature = Signature(config)

    def request(self, values: Any) -> InferenceRequest:
        return self._signature.request({"X": np.asarray(values, np.float32)})

    def execute(self, *batch: Any) -> list[InferenceRequest]:
        """Send a batch, and let the peer read it."""
        requests = [self.request(values) for values in batch]
        self.link.execute(requests)
        self.peer.receive()
        return requests

    def finish(self, requests: list[InferenceRequest]) -> list[dict[str, Any]]:
        """Return the outputs of each response."""
        outcomes = self.link.finish(requests)
        assert all(isinstance(outcome, Response) for outcome in outcomes), outcomes
        return [outcome.outputs for outcome in outcomes if isinstance(outcome, Response)]

    @property
    def lent_bytes(self) -> int:
        """Return the bytes in use in the link's own arena."""
        return self.link.borrowed_blocks.used_bytes

    def close(self) -> None:
        self.link.conversation.channel.close()
        self.peer.channel.close()
        self.link.close()
        self.memory.close()


def y(size: int, block: int = 0, offset: int = 0) -> Row:
    """Make the entry of an output Y of so many elements."""
    return [0, FP32, [size], block, offset, 4 * size]
