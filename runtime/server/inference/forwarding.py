"""Headers of requests that models get as parameters: `--http-header-forward-pattern` and
`--grpc-header-forward-pattern`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from moonpool.runtime.errors import InvalidRequest

# Parameters that mean something to the server itself. A proxy that checks bodies would not see a header that sets one.
_RESERVED = frozenset(
    ("binary_data_output", "headers", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout")
)
_RESERVED_PREFIX = "triton_"


class ForwardedHeaders:
    """Chooses headers by a pattern, as Triton does: any part of the name may match, in any case."""

    def __init__(self, pattern: str) -> None:
        """Raise `re.error` for an invalid pattern. An empty one forwards nothing."""
        self._pattern = re.compile(pattern, re.IGNORECASE) if pattern else None

    def choose(self, headers: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
        """Return the headers that are forwarded, with their names as they were sent. Binary ones never are.

        Raises `InvalidRequest` if one has the name of a parameter of the server's own.
        """
        if self._pattern is None:
            return {}
        chosen = {name: text for name, text in headers if isinstance(text, str) and self._pattern.search(name)}
        for name in chosen:
            if name.lower() in _RESERVED or name.lower().startswith(_RESERVED_PREFIX):
                raise InvalidRequest(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        return chosen
