"""Keeps the requests of a sequence with one replica, by their correlation id.

Ray makes a router in each process that sends requests: in each replica of the ingress, and in each program with a
handle. All of them must choose the same replica without asking each other. So a new sequence goes to the replica whose
id gives the highest hash together with that of the sequence. When replicas come or go, this changes the choice for as
few sequences as possible. A router also remembers its choice for as long as that replica is there, so a sequence that
runs stays where its state is when replicas are added. If the replica has gone, the state has gone with it. The next one
that is asked knows no such sequence, and answers as Triton does: its first request must have the flag START.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import MultiplexMixin, RequestRouter

# The sequences that a router remembers.
_MOST = 65_536


class SequenceRouter(MultiplexMixin, RequestRouter):  # type: ignore[misc]
    """Routes calls with a keyword `sequence` by it, and others to one of two replicas at random, whichever has less to
    do.

    Derives from `RequestRouter` alone, which gives the chosen replica to the very request that it was chosen for. Ray's
    own router gives it to the oldest one that waits.
    """

    def initialize_state(self, **_: Any) -> None:
        """Begin without any sequence. Called by Ray."""
        self._chosen: OrderedDict[str, Any] = OrderedDict()
        self._waiting: dict[int, Any] = {}

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replicas that may take the request. Called by Ray."""
        sequence = "" if pending_request is None else pending_request.kwargs.get("sequence", "")
        if sequence:
            return [[self._of_sequence(sequence, candidate_replicas)]] if candidate_replicas else []
        if pending_request is not None and pending_request.metadata.multiplexed_model_id:
            ids = self.apply_multiplex_routing(pending_request=pending_request)
            candidate_replicas = [each for each in candidate_replicas if each.replica_id in ids]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    # Ray finds the request that a replica was chosen for by its id. But all calls that a replica makes while it handles
    # one request have the id of that request, so of several such calls Ray would find one and forget the others. The
    # object of their metadata tells them apart.

    def _add_pending_request_to_indices(self, pending_request: Any) -> None:
        self._waiting[id(pending_request.metadata)] = pending_request
        super()._add_pending_request_to_indices(pending_request)

    def _remove_pending_request_from_indices(self, pending_request: Any) -> None:
        self._waiting.pop(id(pending_request.metadata), None)
        super()._remove_pending_request_from_indices(pending_request)

    def _get_pending_request_matching_internal_request_id(self, request_metadata: Any = None) -> Any:
        found = self._waiting.get(id(request_metadata))
        return None if found is None or found.future.done() else found

    def _of_sequence(self, sequence: str, replicas: list[Any]) -> Any:
        remembered = self._chosen.pop(sequence, None)
        replica = next((each for each in replicas if each.replica_id == remembered), None)
        if replica is None:
            replica = max(replicas, key=lambda each: _weight(sequence, str(each.replica_id)))
        self._chosen[sequence] = replica.replica_id
        if len(self._chosen) > _MOST:
            self._chosen.popitem(last=False)
        return replica


def _weight(sequence: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{replica}/{sequence}".encode(), digest_size=8).digest()
