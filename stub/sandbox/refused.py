"""What is said where a layer cannot be put on."""

from __future__ import annotations


class SandboxRefused(Exception):
    """A layer that is required cannot be put on: which, why, and what to do about it."""

    def __init__(self, layer: str, why: str, what_to_do: str) -> None:
        """The three are words of one sentence."""
        self.layer = layer
        super().__init__(f"{layer}: {why}; {what_to_do}")
