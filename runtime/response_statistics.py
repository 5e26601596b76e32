"""Counts of the responses that decoupled models give one after another, by their place among them."""

from __future__ import annotations

from moonpool.runtime.bucket_counts import BucketCounts

# Beyond these places responses are counted at the last one.
_MOST = 1000
_MS = 1_000_000
# As in Triton; a model's configuration may say other ones.
FIRST_RESPONSE_BOUNDS_NS = tuple(n * _MS for n in (100, 500, 2000, 5000))
_KINDS = ("success", "fail", "empty_response", "cancel")


class ResponseStatistics:
    """Recorded on the reactor's thread; a snapshot may be taken at any time. Durations are nanoseconds."""

    __slots__ = ("_places", "first")

    def __init__(self, first_bounds_ns: tuple[int, ...] = FIRST_RESPONSE_BOUNDS_NS) -> None:
        # By place: count and duration of each kind.
        self._places: dict[int, list[int]] = {}
        # From a request to the first response to it.
        self.first = BucketCounts(first_bounds_ns)

    def record(self, place: int, kind: str, duration_ns: int) -> None:
        """The response at this place, counted from 0, came so long after the one before it.

        `kind` is success, fail, empty_response (the word that there are no more) or cancel (one that
        nobody waited for any more).
        """
        place = min(place, _MOST - 1)
        counts = self._places.get(place)
        if counts is None:
            counts = self._places[place] = [0] * (2 * len(_KINDS))
        at = 2 * _KINDS.index(kind)
        counts[at] += 1
        counts[at + 1] += duration_ns

    def snapshot(self) -> dict[str, dict[str, dict[str, int]]]:
        """`response_stats` of the statistics extension."""
        shown = {}
        for place, counts in sorted(self._places.copy().items()):
            kinds = {
                kind: {"count": counts[2 * i], "ns": counts[2 * i + 1]}
                for i, kind in enumerate(_KINDS)
            }
            # The outputs of both lie where the model wrote them, and take no time to get at.
            infer = [kinds["success"], kinds["fail"]]
            computed = sum(each["count"] for each in infer)
            shown[str(place)] = {
                "compute_infer": {"count": computed, "ns": sum(each["ns"] for each in infer)},
                "compute_output": {"count": computed, "ns": 0},
                **kinds,
            }
        return shown
