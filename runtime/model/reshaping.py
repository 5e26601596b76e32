"""Reshapes tensors that a model has in another shape than its clients, by `reshape` of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moonpool.runtime.model.config.model import ModelConfig, TensorConfig


class Reshaping(NamedTuple):
    """Turns shapes of one form into shapes of another.

    -1 is any size. Both forms have the same number of these, which stand for each other in their order.
    """

    given: tuple[int, ...]
    wanted: tuple[int, ...]
    has_rows: bool

    def of(self, shape: Sequence[int]) -> list[int]:
        """Return a shape in the other form, after its rows. A shape that does not have the first form stays as it
        is.
        """
        rows, own = (list(shape[:1]), shape[1:]) if self.has_rows else ([], shape)
        if len(own) != len(self.given) or (self.has_rows and not rows):
            return list(shape)
        pairs = list(zip(self.given, own, strict=True))
        if any(want not in (-1, have) for want, have in pairs):
            return list(shape)
        sizes = iter([have for want, have in pairs if want == -1])
        return rows + [next(sizes) if dim == -1 else dim for dim in self.wanted]


def of_inputs(config: ModelConfig) -> dict[str, Reshaping]:
    """Return the reshapings of inputs, by name: from the clients' form to the model's."""
    return _of(config.inputs, config)


def of_outputs(config: ModelConfig) -> dict[str, Reshaping]:
    """Return the reshapings of outputs, by name: from the model's form to the clients'."""
    return {
        name: Reshaping(there.wanted, there.given, there.has_rows)
        for name, there in _of(config.outputs, config).items()
    }


def _of(tensors: Iterable[TensorConfig], config: ModelConfig) -> dict[str, Reshaping]:
    """Return the reshapings from the clients' form to the model's, by name."""
    has_rows = config.max_batch_size > 0
    return {
        tensor.name: Reshaping(tensor.dims, tensor.reshape, has_rows)
        for tensor in tensors
        if tensor.reshape is not None
    }
