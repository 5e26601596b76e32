"""The outcome of putting on layers: those that are on, those that were left out, or the error that stops the load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

GO_WITHOUT = "use the level best-effort to go without"


class SandboxRefused(Exception):
    """A required layer cannot be put on. Says which, why, and what to change."""

    def __init__(self, layer: str, why: str, what_to_do: str) -> None:
        """The three arguments become one sentence."""
        self.layer = layer
        super().__init__(f"{layer}: {why}; {what_to_do}")


@contextmanager
def refusing(layer: str, what_to_do: str = GO_WITHOUT) -> Iterator[None]:
    """Raise `SandboxRefused` for this layer if the kernel refuses a call inside the block."""
    try:
        yield
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        why = f"the kernel refused it{where} ({error.strerror})"
        raise SandboxRefused(layer, why, what_to_do) from error


class Applied:
    """The names of the layers that are on, in order, and a sentence for each layer that was left out."""

    def __init__(self) -> None:
        """Begin with the layer that `boot.py` puts on every stub."""
        self.on: list[str] = ["dies_with_runtime"]
        self.left_out: list[str] = []

    def leave_out(self, why: str) -> None:
        """Note that something was left out, if there is a reason."""
        if why:
            self.left_out.append(why)
