"""Texts in messages: their limits are in bytes of UTF-8, as those of packets are."""

from __future__ import annotations


def size_of(text: str) -> int:
    """How many bytes a text takes. What is no Unicode counts as the mark that takes its place."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def beginning(text: str, most_bytes: int) -> str:
    """The beginning of a text, at most so many bytes, with `?` for what is no Unicode."""
    # A character takes at least a byte: the slice bounds what is encoded.
    taken = text[:most_bytes].encode("utf-8", "replace")[:most_bytes]
    return taken.decode("utf-8", "ignore")


def end(text: str, most_bytes: int) -> str:
    """As `beginning`, from the end."""
    if most_bytes <= 0:
        return ""
    taken = text[-most_bytes:].encode("utf-8", "replace")[-most_bytes:]
    return taken.decode("utf-8", "ignore")
