"""Where requests of sequences wait: the rules of `runtime.sequences` for real requests and instances."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.request import AGAIN, LATER
from moonpool.runtime.sequence import START, lost
from moonpool.runtime.sequence_controls import SequenceControls
from moonpool.runtime.sequences import Sequencer
from moonpool.runtime.waiting_room import Plan, WaitingRoom

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.config import ModelConfig, SequenceBatching
    from moonpool.runtime.request import Answer, InferenceRequest

_log = logging.getLogger("moonpool")


class SequenceRoom(WaitingRoom):
    """For a model with a sequence batcher."""

    keeps_sequences = True

    def __init__(self, config: ModelConfig, batching: SequenceBatching) -> None:
        super().__init__(config)
        self._is_open = False
        self._model = config.name
        self._is_iterative = batching.is_iterative
        self._controls = SequenceControls(config, batching.controls)
        self._sequencer: Sequencer[InferenceRequest, ModelInstance] = Sequencer(
            batching, config.max_batch_size, config.name
        )

    def __len__(self) -> int:
        return len(self._sequencer)

    def add(self, request: InferenceRequest, now_ns: int) -> None:
        self._controls.check(request.correlation_id)
        # It was on its way into an instance that broke; its id may be another sequence's by now.
        if request.attempts and not request.flags & START:
            raise lost(request.correlation_id, self._model)
        if self._sequencer.add(request, now_ns):
            _log.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before "
                "this sequence start. Previous sequence will be terminated early.",
                request.correlation_id,
                self._model,
            )

    def remove(self, request: InferenceRequest, now_ns: int) -> bool:
        return self._sequencer.remove(request, now_ns)

    def drain(self, now_ns: int) -> list[InferenceRequest]:
        return self._sequencer.drain(now_ns)

    def form(self, now_ns: int, idle: Sequence[ModelInstance]) -> Plan:
        formation = self._sequencer.form(now_ns, idle)
        batches = [
            (instance, self._controls.complete(batch)) for instance, batch in formation.batches
        ]
        return Plan(batches, formation.failed, formation.wake_at_ns)

    def answered(self, request: InferenceRequest, answer: Answer, now_ns: int) -> Answer:
        if request.fills_place:
            return _GONE if answer is AGAIN else answer
        if answer is LATER and self._is_iterative:  # it may come back
            return answer
        if answer is AGAIN and self._is_iterative:
            if not request.left and self._sequencer.again(request, now_ns):
                request.queued_ns = now_ns
                return AGAIN
            answer = _GONE
        self._sequencer.done(request, now_ns)
        return super().answered(request, answer, now_ns)

    def ended(self, request: InferenceRequest, now_ns: int) -> None:
        self._sequencer.done(request, now_ns)

    def join(self, instance: ModelInstance, now_ns: int) -> None:
        self._sequencer.join(instance, now_ns)

    def retire(self, instance: ModelInstance) -> bool:
        return self._sequencer.retire(instance)

    def leave(self, instance: ModelInstance, now_ns: int) -> None:
        self._sequencer.leave(instance, now_ns)

    def close(self, now_ns: int) -> None:
        self._sequencer.close(now_ns)


def room_for(config: ModelConfig) -> WaitingRoom:
    """Where the requests of this model wait."""
    sequences = config.sequence_batching
    return WaitingRoom(config) if sequences is None else SequenceRoom(config, sequences)


# Nobody sees it: it is for requests that nobody waits for.
_GONE = ModelUnavailable("the caller left")
