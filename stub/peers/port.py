"""The stub's end of a work channel: it makes requests of a batch that comes, and places and sends what the model
returns. In Python and compiled.

Theory of operation. `_stub_port.pyx` is the compiled form. It finds inputs and places outputs by arithmetic, whatever
their shapes and rows, and keeps nothing from batch to batch. It makes requests over shared memory, also of clients,
with all their details, and answers them with outputs that are copied, also to memory of clients, with errors and
parameters, and with the blocks that the model keeps. It looks if everything is so before it changes anything. If not,
the layers do it (`batch.py`, `answer.py`, `placement.py`): `open` returns None, `take` and `give` return False. If one
response of a batch is rare, `take` calls the layers for that one. So the layers are the definition, and the port leaves
their objects as they would.

`ApartPlacer` of the compiled form does so with a response that goes apart from the answer to its batch, on any thread,
if a block for it has come back (`Responses`).

The port of this file does nothing, so that the layers do everything. It is for interpreters without the compiled one,
and for stubs that are to go without it.

For the main thread of a stub. The control thread reads `Peer.executing` and appends to `Regions.returned` meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.slots import SlotChannel
from moonpool.stub import attributes
from moonpool.stub.pb_utils.request import UNTRACED, InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.batch import Target
from moonpool.stub.peers.placement import PASSED_BYTES
from moonpool.stub.peers.regions import LentRegion

if attributes.compiled is not None:
    attributes.compiled.use(
        Tensor, InferenceRequest, InferenceResponse, UNTRACED, PASSED_BYTES, lent_region=LentRegion, target=Target
    )


class StubPort:
    """Receives, and leaves everything else to the layers."""

    def __init__(self, channel: Channel | SlotChannel) -> None:
        # Returns the next packet. Blocks.
        self.receive = channel.receive

    def open(self, packet: bytes) -> list[InferenceRequest] | None:  # noqa: ARG002
        """Return the requests of an EXECUTE. Returns None, and has done nothing, if the layers have to do it."""
        return None

    def open_stacked(self, packet: bytes, is_batched: bool) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the inputs of a batch by their names, each with the rows of all requests one after another.

        Returns None, and has done nothing, if they do not lie so, or if the layers have to do it. For moonpool's own
        models, which see no requests.
        """
        return None

    # The rows of each request of the batch that `open_stacked` has opened; none if the model takes no batches.
    counts: Sequence[int] = ()

    def requests(self) -> list[InferenceRequest]:
        """Return the requests of the batch that `open_stacked` has opened."""
        return []

    def take_stacked(self, outputs: dict[str, Any]) -> bool:  # noqa: ARG002
        """Place the rows of all requests, which the model has returned by the names of the outputs.

        Returns False, and has done nothing, if the layers have to do it.
        """
        return False

    def take(self, requests: list[InferenceRequest], returned: object) -> bool:  # noqa: ARG002
        """Place the responses of the model to the requests of the batch that is open.

        Returns False, and has done nothing, if the layers have to check them first.
        """
        return False

    def give(self) -> bool:
        """Answer the batch, of whose objects nothing else of ours is left.

        Returns False, and has done nothing, if the layers have to do it. Raises `PeerGone`.
        """
        return False


def compiled_port(start: dict[str, Any]) -> Any:
    """Return the extension if START wants it and this process has it, else None."""
    return attributes.compiled if start["compiled"] else None
