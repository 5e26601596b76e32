"""Texts in messages: their limits are in bytes of UTF-8, as those of packets are."""

from __future__ import annotations


def size_of(text: str) -> int:
    """Return the bytes that a text takes. A character that is no Unicode counts as the `?` that replaces it."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def beginning(text: str, most_bytes: int) -> str:
    """Return the beginning of a text, at most `most_bytes`, with `?` for characters that are no Unicode."""
    # A character takes at least a byte: the slice bounds what is encoded.
    taken = text[:most_bytes].encode("utf-8", "replace")[:most_bytes]
    return taken.decode("utf-8", "ignore")


def end(text: str, most_bytes: int) -> str:
    """As `beginning`, from the end."""
    if most_bytes <= 0:
        return ""
    taken = text[-most_bytes:].encode("utf-8", "replace")[-most_bytes:]
    return taken.decode("utf-8", "ignore")
