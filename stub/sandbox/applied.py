"""What came of putting a sandbox on."""

from __future__ import annotations


class Applied:
    """Names of the layers that are on, in order, and a sentence for each that was left out."""

    def __init__(self) -> None:
        """With what `boot.py` does for every stub."""
        self.on: list[str] = ["dies_with_runtime"]
        self.left_out: list[str] = []
