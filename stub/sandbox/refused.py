"""What is said where a layer cannot be put on."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

GO_WITHOUT = "use the level best-effort to go without"


class SandboxRefused(Exception):
    """A layer that is required cannot be put on: which, why, and what to do about it."""

    def __init__(self, layer: str, why: str, what_to_do: str) -> None:
        """The three are words of one sentence."""
        self.layer = layer
        super().__init__(f"{layer}: {why}; {what_to_do}")


@contextmanager
def refusing(layer: str, what_to_do: str = GO_WITHOUT) -> Iterator[None]:
    """Where the kernel refuses something inside, raise `SandboxRefused` for this layer."""
    try:
        yield
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        why = f"the kernel refused it{where} ({error.strerror})"
        raise SandboxRefused(layer, why, what_to_do) from error
