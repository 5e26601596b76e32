"""Requests whose responses come apart from the answer to their batch, as the scheduler counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.request import InferenceRequest


class OpenRequests:
    """Not thread-safe: the scheduler holds its lock around every call."""

    def __init__(self) -> None:
        self._instance_of: dict[InferenceRequest, ModelInstance] = {}
        # Those that had their last response before the answer to their batch.
        self._ended: set[InferenceRequest] = set()

    def __len__(self) -> int:
        return len(self._instance_of)

    def open(self, request: InferenceRequest, instance: ModelInstance) -> None:
        """Its batch was answered, it was not; unless it has had its last response already.

        Nobody waits for what fills a place.
        """
        if request in self._ended:
            self._ended.remove(request)
        elif not request.fills_place:
            self._instance_of[request] = instance

    def end(self, request: InferenceRequest, *, is_executing: bool) -> bool:
        """It had its last response; False where that is no news."""
        if self._instance_of.pop(request, None) is not None:
            return True
        if is_executing and request not in self._ended:
            self._ended.add(request)
            return True
        return False

    def instance_of(self, request: InferenceRequest) -> ModelInstance | None:
        """The instance that is going to answer it; None for one that is not open."""
        return self._instance_of.get(request)

    def has(self, instance: ModelInstance) -> bool:
        """Whether an instance has any."""
        return instance in self._instance_of.values()

    def take(self, instance: ModelInstance | None = None) -> list[InferenceRequest]:
        """Forget those of an instance, or all, and return them."""
        taken = [
            request
            for request, its_instance in self._instance_of.items()
            if instance is None or its_instance is instance
        ]
        for request in taken:
            del self._instance_of[request]
        return taken

    def without_ended(self, requests: Iterable[InferenceRequest]) -> list[InferenceRequest]:
        """Those of a batch that was lost which had no last response yet, and that somebody sent."""
        left = [each for each in requests if each not in self._ended and not each.fills_place]
        self._ended.difference_update(requests)
        return left
