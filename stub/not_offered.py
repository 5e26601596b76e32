"""The parts of Triton's surface that moonpool does not have yet.

Their names exist, so that a model which imports them can be loaded; using one raises
TritonModelException.
"""

# The signatures are Triton's, although nothing is done with the arguments.
from __future__ import annotations

from moonpool.stub.errors import not_offered


class InferenceResponseSender:
    """Sends responses at any time after `execute` was called."""

    __module__ = "c_python_backend_utils"

    def __init__(self) -> None:
        raise not_offered("response senders (InferenceResponseSender)")
