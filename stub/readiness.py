"""The model's own word on whether it is ready."""

from __future__ import annotations

import threading
from types import CoroutineType
from typing import TYPE_CHECKING

from moonpool.ipc.messages import SHORT, Kind
from moonpool.ipc.texts import beginning
from moonpool.stub.report import describe

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any, Callable


class Readiness:
    """Asks a model's `is_ready` on a thread of its own, so that it holds up nothing else."""

    def __init__(
        self,
        instance: str,
        tell: Callable[..., None],
        wait_for: Callable[[Coroutine[Any, Any, object]], object],
    ) -> None:
        """`tell` sends a control message, `wait_for` runs a coroutine where the model's others run."""
        self._instance = instance
        self._tell = tell
        self._wait_for = wait_for
        # The model's function, if it has one.
        self.check: Callable[[], object] | None = None

    def ask(self, question: int) -> None:
        """Answer with READINESS, later."""
        thread = threading.Thread(
            target=self._answer, args=(question,), name="moonpool-ready", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            self._tell(Kind.READINESS, question, self._refusal(error))

    def _answer(self, question: int) -> None:
        self._tell(Kind.READINESS, question, self.why_not())

    def why_not(self) -> str | None:
        """Ask the model, and wait for it: None where it is ready, else the reason."""
        if self.check is None:
            return None
        try:
            is_ready = self.check()
            if isinstance(is_ready, CoroutineType):
                is_ready = self._wait_for(is_ready)
        except BaseException as error:  # a model may raise anything, SystemExit included
            return self._refusal(error)
        if not isinstance(is_ready, bool):
            return "is_ready() must return a boolean value"
        if not is_ready:
            return f"Model '{self._instance}' is not ready (user-defined check failed)."
        return None

    def _refusal(self, error: BaseException) -> str:
        text = f"Model '{self._instance}' is not ready: {describe(error)}"
        return beginning(text, SHORT)
