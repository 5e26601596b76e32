"""The attributes of the objects that the compiled port of a stub looks into: classes with no methods, from which the
classes of models and of the layers derive. In Python and compiled.

Theory of operation. The compiled forms (`stub/peers/_stub_port.pyx`) keep attributes in the same way, and Python
reaches them as fast, but the port knows where they are. They are there if this process may use compiled code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moonpool.ipc.extension import is_wanted, load_if_there


class TensorBase:
    """A tensor."""

    __slots__ = ("_array", "_datatype", "_name", "_shape", "_strings", "_wire")


class InferenceResponseBase:
    """The response to a request."""

    __slots__ = ("_error", "_outputs", "_parameters")


class InferenceRequestBase:
    """A request of a batch, or to another model."""

    __slots__ = (
        "_cancelled",
        "_inputs",
        "_model_name",
        "_model_version",
        "_origin",
        "_preferred_memory",
        "_release_flags",
        "_reply",
        "_requested_output_names",
        "_row",
        "_sender",
        "_trace",
    )


class BatchBase:
    """The blocks of the batch that is open."""

    __slots__ = ("has_copies", "kept", "lent", "places", "targets")


class AnswerBase:
    """The outcomes of its requests so far."""

    __slots__ = ("blocks", "layouts", "remarks", "states")


PYTHON_FORMS = (TensorBase, InferenceResponseBase, InferenceRequestBase, BatchBase, AnswerBase)

# The compiled port, None if there is none.
compiled: Any = load_if_there("moonpool.stub.peers._stub_port") if is_wanted() else None
if not TYPE_CHECKING and compiled is not None:
    TensorBase, InferenceResponseBase, InferenceRequestBase, BatchBase, AnswerBase = (
        getattr(compiled, form.__name__) for form in PYTHON_FORMS
    )
