"""A sequence batcher for the one instance of a test: its rules and its inputs, without its delays."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.sequence_controls import SequenceControls
from moonpool.runtime.sequences import Sequencer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.runtime.config import ModelConfig, SequenceBatching
    from moonpool.runtime.request import InferenceRequest

_INSTANCE = "here"
_DAY_US = 24 * 3600 * 1_000_000


class Sequences:
    """Which requests a model with a sequence batcher gets together. One thread at a time."""

    def __init__(self, config: ModelConfig, batching: SequenceBatching) -> None:
        at_once = replace(
            batching,
            max_idle_us=_DAY_US,
            max_queue_delay_us=0,
            minimum_slot_utilization=0.0,
            preferred_batch_sizes=(),
        )
        self._slots = batching.slots
        self._model = config.name
        self._controls = SequenceControls(config, batching.controls)
        self._sequencer: Sequencer[InferenceRequest, str] = Sequencer(
            at_once, config.max_batch_size, config.name
        )
        self._sequencer.join(_INSTANCE, time.monotonic_ns())

    def run(
        self,
        requests: Sequence[InferenceRequest],
        execute: Callable[[list[InferenceRequest]], list[bool]],
    ) -> None:
        """Pass the requests to `execute` in batches, until each has had its last response.

        It says of each request of a batch, those that fill empty places included, whether it is to come again. Raises
        `InvalidRequest` for what breaks the rules of sequences, and for a sequence that would have to wait for another one.
        """
        try:
            for request in requests:
                self._controls.check(request.correlation_id)
                self._sequencer.add(request, time.monotonic_ns())
            while len(self._sequencer):
                self._execute(execute)
        except BaseException:
            for request in requests:
                self._sequencer.remove(request, time.monotonic_ns())
            raise

    def _execute(self, execute: Callable[[list[InferenceRequest]], list[bool]]) -> None:
        formation = self._sequencer.form(time.monotonic_ns(), [_INSTANCE])
        if not formation.batches:
            raise InvalidRequest(
                f"an instance of model '{self._model}' has {self._slots} sequences at a time, and so many "
                "are open: a runtime would wait until one of them has ended"
            )
        ((_, places),) = formation.batches
        batch = self._controls.complete(places)
        again = [False] * len(batch)
        try:
            again = execute(batch)
        finally:
            for request, comes_again in zip(batch, again, strict=True):
                if comes_again and not request.fills_place:
                    self._sequencer.again(request, time.monotonic_ns())
                else:
                    self._sequencer.done(request, time.monotonic_ns())
