"""What a field of a message may be. The tables in `ipc.messages` are made of these, and `ipc.codec` compiles them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Union

    Spec = Union[
        "Int", "Real", "Text", "Raw", "Flag", "Table", "ListOf", "Row", "Maybe", "OneOf", "Packed"
    ]


_MAX_INT = 2**63 - 1


class Int:
    """A whole number within bounds. Not a bool, not a float."""

    __slots__ = ("high", "low")

    def __init__(self, low: int = 0, high: int = _MAX_INT) -> None:
        self.low = low
        self.high = high


class Real:
    """A float: any, also infinite ones and those that are no numbers."""

    __slots__ = ()


class Text:
    """A string of at most so many bytes in UTF-8."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class Raw:
    """Bytes, at most so many."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class Flag:
    """True or false."""

    __slots__ = ()


class Table:
    """A dictionary with string keys and scalar values: parameters of a request or a response."""

    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class ListOf:
    """At most so many of one thing."""

    __slots__ = ("item", "length")

    def __init__(self, item: Spec, length: int) -> None:
        self.item = item
        self.length = length


class Row:
    """A list with a fixed number of fields."""

    __slots__ = ("fields",)

    def __init__(self, **fields: Spec) -> None:
        self.fields = fields


class Maybe:
    """The thing or nil."""

    __slots__ = ("item",)

    def __init__(self, item: Spec) -> None:
        self.item = item


class OneOf:
    """The one or the other, told apart by type."""

    __slots__ = ("items",)

    def __init__(self, *items: Spec) -> None:
        self.items = items


class Packed:
    """Bytes that are the packed form of a thing of its own, read with `codec.unpack_layout`.

    For what is the same in message after message: whoever meets bytes again knows what they say.
    """

    __slots__ = ("item", "length")

    def __init__(self, item: Spec, length: int) -> None:
        self.item = item
        self.length = length
