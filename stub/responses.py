"""Responses on their way to the runtime, of requests that the answer to their batch left open."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from moonpool.ipc.errors import CODES
from moonpool.ipc.messages import FINAL
from moonpool.stub.errors import TritonModelException
from moonpool.stub.placement import error_remark
from moonpool.stub.reply import DROPPED, Port, Reply

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from moonpool.stub.control import Control
    from moonpool.stub.placement import Placer
    from moonpool.stub.response import InferenceResponse


class Responses(Port):
    """Places responses and hands them to the control channel. Any thread may call any method."""

    def __init__(self, placer: Placer, control: Control, start: dict[str, Any]) -> None:
        self.is_decoupled = bool(start["decoupled"])
        self._placer = placer
        self._control = control
        # Those to requests that may still be answered apart from their batches.
        self.replies: dict[tuple[int, int], weakref.ref[Reply]] = {}
        # Whether this is a process that the model forked, which has but copies of all replies.
        self.is_forked = False

    @property
    def are_open(self) -> bool:
        """Whether any request may still be answered apart from its batch."""
        return bool(self.replies)

    def reply(self, batch: int, index: int, wanted: Collection[str]) -> Reply:
        reply = Reply(self, batch, index, wanted)
        self.replies[batch, index] = weakref.ref(reply)
        return reply

    def find(self, batch: int, index: int) -> Reply | None:
        """The state of a request's responses, while somebody may send any."""
        known = self.replies.get((batch, index))
        return None if known is None else known()

    def cancel_all(self) -> None:
        """Nobody waits for any response any more. From any thread."""
        for known in self.replies.copy().values():
            reply = known()
            if reply is not None:
                reply.is_cancelled = True

    def respond(self, reply: Reply, response: InferenceResponse | None, flags: int) -> None:
        """A response that cannot be placed reaches the client as an error, as in Triton."""
        if self.is_forked:
            raise TritonModelException(
                "Unable to send response. A process that the model forked cannot send any."
            )
        blocks: list[list[int]] = []
        layout = remark = None
        if response is not None:
            plan, remark = self._placer.answer(
                response, reply.wanted, blocks, wish=reply.preferred_memory
            )
            layout = self._placer.layout((plan,)) if plan else None
        if flags:
            self.forget(reply)
        if blocks:
            self._placer.publish()
        self._control.respond([reply.batch, reply.index, flags, blocks, layout, remark])

    def forget(self, reply: Reply) -> None:
        self.replies.pop((reply.batch, reply.index), None)

    def abandon(self, reply: Reply) -> None:
        if self.is_forked:
            return
        self.forget(reply)
        remark = error_remark(CODES.index("INTERNAL"), DROPPED)
        self._control.respond([reply.batch, reply.index, FINAL, [], None, remark])
