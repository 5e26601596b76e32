"""A model that is loaded: its versions, and what they were made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.hosted_model import HostedModel
    from moonpool.runtime.loading import Prepared
    from moonpool.runtime.model_statuses import ModelStatus


class LoadedModel:
    """Never changes; `versions` are by number, `status` is that of their load."""

    def __init__(
        self, versions: Sequence[HostedModel], prepared: Prepared, status: ModelStatus
    ) -> None:
        self.versions = {hosted.model.version: hosted for hosted in versions}
        self.latest = versions[-1]
        self.status = status
        self._prepared = prepared

    def is_what(self, prepared: Prepared, *, at_least_once: bool) -> bool:
        """Whether these versions are what was prepared, and serve, or did `at_least_once`."""
        return self._prepared.stamp == prepared.stamp and (
            at_least_once
            or all(hosted.why_not_serving() is None for hosted in self.versions.values())
        )

    def unload(self, drain_timeout_s: float) -> None:
        """Drain and finalize all versions, and give up what was made for them."""
        for hosted in self.versions.values():
            hosted.unload(drain_timeout_s)
        self._prepared.discard()
