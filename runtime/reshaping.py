"""Tensors that a model has in another shape than its clients: `reshape` of its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from moonpool.runtime.config import ModelConfig, TensorConfig


class Reshaping(NamedTuple):
    """From one form of a tensor to the other.

    -1 is any size; both forms have as many of them, which stand for each other in their order.
    """

    given: tuple[int, ...]
    wanted: tuple[int, ...]
    has_rows: bool

    def of(self, shape: Sequence[int]) -> list[int]:
        """This shape in the other form, its rows before it; one that is not of the first form stays as it is."""
        rows, own = (list(shape[:1]), shape[1:]) if self.has_rows else ([], shape)
        if len(own) != len(self.given) or (self.has_rows and not rows):
            return list(shape)
        pairs = list(zip(self.given, own, strict=True))
        if any(want not in (-1, have) for want, have in pairs):
            return list(shape)
        sizes = iter([have for want, have in pairs if want == -1])
        return rows + [next(sizes) if dim == -1 else dim for dim in self.wanted]


def of_inputs(config: ModelConfig) -> dict[str, Reshaping]:
    """By name, those that clients do not send as the model has them."""
    return _of(config.inputs, config)


def of_outputs(config: ModelConfig) -> dict[str, Reshaping]:
    """By name, those that clients do not get as the model has them."""
    return {
        name: Reshaping(there.wanted, there.given, there.has_rows)
        for name, there in _of(config.outputs, config).items()
    }


def _of(tensors: Iterable[TensorConfig], config: ModelConfig) -> dict[str, Reshaping]:
    """From what clients have to what the model has."""
    has_rows = config.max_batch_size > 0
    return {
        tensor.name: Reshaping(tensor.dims, tensor.reshape, has_rows)
        for tensor in tensors
        if tensor.reshape is not None
    }
