"""Stands in for Triton's Python API: the suite names its types, and nothing of it runs."""

from __future__ import annotations

from typing import Any


class Server:
    """A type that annotations name."""


class ModelControlMode:
    """The modes, as `moonpool serve` names them."""

    NONE = "none"
    EXPLICIT = "explicit"


class _AnyType(type):
    """The class of a type that has any other one inside."""

    def __getattr__(cls, name: str) -> Any:
        return _named(name)


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyType(name, (), {})


__getattr__ = _named
