"""Other processes that send batches to the stubs of a runtime, as the runtime sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.ipc.errors import MoonpoolError
    from moonpool.runtime.backend import Model
    from moonpool.runtime.outcomes import Outcomes
    from moonpool.runtime.stub_handle import StubHandle


class Audience:
    """Is told of models and of their stubs. This one is empty; `runtime.frontend.pool` has the other one.

    Any thread may call any method; but for `withdraw` and `catch_up` none blocks.
    """

    # Whether anybody may come. It is settled when the first stub starts.
    is_there = False

    def model_ready(self, model: Model) -> None:
        """A model version has its final configuration; its stubs follow."""

    def model_gone(self, model: Model) -> None:
        """A model version is finalized."""

    def stub_ready(self, model: Model, stub: StubHandle) -> None:
        """A stub takes batches."""

    def stub_gone(self, stub: StubHandle, reason: BaseException) -> None:
        """A stub is dead, or about to die; `reason` is for the requests that it had. Twice is as good as once."""

    def withdraw(self, stub: StubHandle, timeout_s: float) -> bool:  # noqa: ARG002
        """Have everybody finish what they have in a stub, and send it no more; waits for it.

        False where somebody has not in time: then all of them may go on.
        """
        return True

    def serve(self, name: str, versions: Sequence[Model]) -> None:
        """From now on, requests for this name go to these versions, ascending; to none where it is empty."""

    def refuse(self, model: Model, error: MoonpoolError) -> None:
        """No instance of a model version is left: its requests get this error."""

    def welcome(self, model: Model) -> None:
        """Take requests of a refused model version again: one of its instances is back."""

    def drain(self, model: Model, error: MoonpoolError, timeout_s: float) -> Callable[[], object]:
        """Let new requests for a model version have this error, and those that are there finish in time.

        Returns a function that waits until they have.
        """
        del model, error, timeout_s
        return _nothing

    def catch_up(self, outcomes: Callable[[Model], Outcomes | None]) -> None:
        """Add to the outcomes of models what was counted elsewhere; waits for it."""


def _nothing() -> None:
    """There is nobody to wait for."""
