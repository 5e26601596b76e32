"""A stub's end of the channels, in the process of a test that speaks as the runtime does: for tests of both ports."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.stub.closing import close_regions

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import control_codec, encode, unpack_layout, work_codec
from moonpool.ipc.conversation import Conversation
from moonpool.ipc.memory import lease_of
from moonpool.ipc.messages import NO_CORE, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.stub import loop
from moonpool.stub.model import Model
from moonpool.stub.pb_utils.memory import use_memory
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.peer import Peer
from moonpool.stub.peers.port import StubPort, compiled_port

INPUTS, OUTPUTS = ["A", "B", "TEXT"], ["SUM", "DIFF", "SAID"]
REQUESTS, ANSWERS, LENT = 1, 2, 3
REGION_BYTES = 1 << 16

Execute = Callable[[list[InferenceRequest]], object]


def in_python(peer: Peer, start: dict[str, Any]) -> StubPort:  # noqa: ARG001 - as `compiled`
    """Make the port that leaves everything to the layers, and have them place all responses."""
    peer.responses._usual = None
    return StubPort(peer.conversation.channel)


def compiled(peer: Peer, start: dict[str, Any]) -> StubPort:  # noqa: ARG001 - as `in_python`
    """Return the compiled port, which the peer has made."""
    return peer.port


def _shown(value: Any) -> Any:
    """Take an object of a batch apart: its class, and the values of its slots."""
    if isinstance(value, np.ndarray):
        lease = lease_of(value)
        place = lease is not None and (lease.token, lease.offset, lease.size, lease.region is not None)
        return (value.dtype.str, value.shape, value.strides, value.flags.writeable, value.tobytes(), place)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_shown(each) for each in value]
    if isinstance(value, (InferenceRequest, Tensor)):
        # Details may be packed still.
        slots = [
            name
            for kind in type(value).__mro__
            for name in getattr(kind, "__slots__", ())
            if name not in ("__weakref__", "_row")
        ]
        slots += ["_details"] if isinstance(value, InferenceRequest) else []
        # What the port makes has None where an attribute of Python's form is never set, nor read.
        return type(value).__name__, {name: _shown(getattr(value, name, None)) for name in slots}
    return value if isinstance(value, (int, str, type(None))) else type(value).__name__


class StubDesk:
    """Serves EXECUTE after EXECUTE through one of both ports. For one thread."""

    def __init__(self, form: Callable[[Peer, dict[str, Any]], StubPort], native: Any = None, **start: Any) -> None:
        """`native` is one of moonpool's own models, to serve that in place of `execute`.

        Skips the test if the form is compiled, and nothing is here.
        """
        if form is compiled and compiled_port({"compiled": True}) is None:
            pytest.skip("moonpool's compiled code is not in use")
        # What the model does in the next batch.
        self.execute: Execute = lambda _: None
        self.start = {
            "instance": "m_0_0",
            "kind": "triton",
            "file": "model.py",
            "inputs": INPUTS,
            "outputs": OUTPUTS,
            "keep_ms": [0, 0],
            "decoupled": False,
            "reschedules": False,
            "copies_gpu_to_numpy": False,
            "brief_errors": False,
            "chat_template": None,
            "args": {},
            "compiled": True,
            "look_us": 0,
            **start,
        }
        work, self.work = Channel.pair()
        control, self.control = Channel.pair()
        self._channels = work, control
        self.regions = {number: SharedRegion.create(number, REGION_BYTES) for number in (REQUESTS, ANSWERS, LENT)}
        conversation = Conversation(work, Side.STUB, cast(Any, None), after=Kind.LOADED)
        # The end of the runtime must not end this process.
        self.peer = Peer(conversation, control, self.start, lambda: None)
        for number, writer in ((REQUESTS, Side.RUNTIME), (ANSWERS, Side.STUB)):
            self.peer.regions.add_first(number, REGION_BYTES, os.dup(self.regions[number].fd), writer)
        self.peer.regions.arrive_lent(LENT, REGION_BYTES, os.dup(self.regions[LENT].fd))
        # The answers to all GROW that may come: an item of the queue is the answer to the next one.
        for _ in range(1000):
            self.peer.regions.refuse("no more")
        self.peer.control.listen(self.peer.regions, self.peer.cancel, cast(Any, None))
        self.peer.port = self.port = form(self.peer, self.start)
        self._stub = self._made(native or (lambda: SimpleNamespace(execute=self._execute)))
        self._batches = 0

    def _made(self, model_class: Any) -> loop.Stub:
        """Make a stub of this peer, without the constructor, which would change the process for good."""
        stub = object.__new__(loop.Stub)
        made: Any = stub
        made._peer = self.peer
        made._handshake = SimpleNamespace(start=self.start)
        made._calls = SimpleNamespace(released=[])
        self._model = Model(self.start, model_class)
        self._model.initialize()
        return stub

    def _execute(self, requests: list[InferenceRequest]) -> object:
        return self.execute(requests)

    def ask(
        self,
        layout: list[Any],
        *,
        blocks: list[list[int]],
        released: list[list[int]] | None = None,
        details: list[Any] | None = None,
        targets: list[list[int]] | None = None,
    ) -> bytes:
        """Execute a batch, and return the packet of ANSWER."""
        self._batches += 1
        return self.ask_with(
            encode(Kind.EXECUTE, self._batches, NO_CORE, released or [], blocks, encode(*layout), details, targets)
        )

    def ask_with(self, packet: bytes) -> bytes:
        """Do the same with a packet."""
        use_memory(self.peer.regions)
        self.work.send(packet)
        self.work.send(encode(Kind.FINALIZE))
        try:
            self._stub._serve(self._model)
        finally:
            use_memory(None)
        # FINALIZE only ended the loop.
        self.peer.conversation.turn = self.peer.conversation.after[Kind.ANSWER]
        return self.work.recv(1 << 16)

    def opened(self, packet: bytes) -> list[Any]:
        """Open a batch as the stub's loop does, and drop it. Returns all that the model and the stub can see of it."""
        peer = self.peer
        seen: list[Any] = []
        try:
            requests = self.port.open(packet)
            if requests is None:
                message = peer.conversation.accept(packet)
                requests = peer.open(message) if message[0] == Kind.EXECUTE else []
        except Exception as error:
            seen.append((type(error).__name__, str(error)))
        else:
            seen += [_shown(request) for request in requests]
            assert peer.executing[1] is requests or not requests
        requests = None
        batch, regions = peer.batch, peer.regions
        seen.append((peer.executing[0], list(batch.places), batch.has_copies))
        seen.append([(type(region).__name__, place, size) for region, place, size in batch.lent])
        seen.append({index: _shown(sorted(each.items())) for index, each in batch.targets.items()})
        peer.executing = (0, [])
        batch.lent.clear()
        # In which order leases end does not count.
        seen.append((list(regions.returned), sorted(batch.returned), batch.kept))  # type: ignore[type-var]
        regions.returned.clear()
        batch.returned.clear()
        peer.conversation.turn = peer.conversation.after[Kind.ANSWER]
        return seen

    def told(self) -> list[list[Any]]:
        """Return the messages on the control channel since the last call."""
        codec, told = control_codec(Side.RUNTIME), []
        with suppress(BlockingIOError):
            while True:
                told.append(codec.decode(self.control.recv(1 << 16, socket.MSG_DONTWAIT)))
        return told

    def write(self, offset: int, array: np.ndarray, region: int = REQUESTS) -> None:
        """Write an input, as the runtime or a client does."""
        self.regions[region].write(offset, array)

    def outputs(self, answer: bytes) -> list[list[tuple[Any, bytes]]]:
        """Return index, datatype and shape of each output of an answer, and its bytes."""
        _, _, _, _, _, blocks, layout, _, _ = work_codec(Side.RUNTIME).decode(answer)
        found = []
        for rows in unpack_layout(layout):
            outputs = []
            for index, datatype, shape, block, offset, size in rows:
                region, start, _ = blocks[block]
                memory = self.regions[region].memory()
                value = bytes(memory[start + offset : start + offset + size])
                outputs.append(((index, datatype, shape), value))
            found.append(outputs)
        return found

    def close(self) -> None:
        """Close both ends."""
        peer = self.peer
        # The compiled one refers to the peer, and no collection of garbage sees that.
        peer.port = self.port = StubPort(peer.conversation.channel)
        for end in (self.work, self.control):
            end.close()
        peer.control._listener.join()
        for channel in self._channels:
            channel.close()
        close_regions(peer.regions)
        for region in self.regions.values():
            region.close()
