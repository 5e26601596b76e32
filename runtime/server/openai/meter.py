"""Counts what clients of OpenAI's API wait for: the first piece of an answer, the gaps between pieces, and tokens."""

from __future__ import annotations

import time
from collections.abc import Collection

from moonpool.runtime.model.request import Response
from moonpool.runtime.observe.distributions import BucketCounts
from moonpool.runtime.observe.exposition import ExposedFamily, Sample
from moonpool.runtime.observe.statistics import DURATION_BOUNDS_NS
from moonpool.runtime.openai.endpoints import PieceReader
from moonpool.runtime.openai.pieces import Piece, PieceCounts
from moonpool.runtime.server.tracing.traces import Trace

_TOKENS = {"prompt_tokens": "prompt", "completion_tokens": "completion"}
# As OpenTelemetry names them in spans.
_ATTRIBUTES = {"prompt_tokens": "gen_ai.usage.input_tokens", "completion_tokens": "gen_ai.usage.output_tokens"}


class ModelCounts:
    """The counts of one model, of its chats and completions. For the loop's thread; any thread may read."""

    def __init__(self) -> None:
        self.first = BucketCounts(DURATION_BOUNDS_NS)
        """Nanoseconds from the request to its first piece."""
        self.gaps = BucketCounts(DURATION_BOUNDS_NS)
        """Nanoseconds between the pieces of an answer."""
        self.tokens = dict.fromkeys(_TOKENS, 0)

    def pieces(self) -> PieceCounts:
        """Return the counts for those who look at the server."""
        answers = sum(self.first.counts)
        return PieceCounts(answers, self.first.total, answers + sum(self.gaps.counts))


class CountingReader:
    """Reads the responses to one request, and counts them."""

    def __init__(self, reader: PieceReader, counts: ModelCounts, received_ns: int, trace: Trace | None = None) -> None:
        """`received_ns` is the time of `time.monotonic_ns` when the request had come. `trace` gets the tokens."""
        self._trace = trace
        self._reader = reader
        self._counts = counts
        self._came_ns = received_ns
        self._is_first = True
        # The tokens that were counted already: a model may tell the sum with each piece.
        self._told: dict[str, int] = {}

    def piece(self, response: Response) -> Piece:
        """Return what a response says. Raises as `PieceReader.piece`."""
        piece = self._reader.piece(response)
        now_ns = time.monotonic_ns()
        if piece.delta:
            counts = self._counts.first if self._is_first else self._counts.gaps
            counts.add(now_ns - self._came_ns)
            self._came_ns, self._is_first = now_ns, False
        if piece.usage is not None:
            for name, count in piece.usage.items():
                self._counts.tokens[name] += max(0, count - self._told.get(name, 0))
            self._told = piece.usage
            if self._trace is not None:
                self._trace.attributes |= {_ATTRIBUTES[name]: count for name, count in piece.usage.items()}
        return piece


class OpenAIMeter:
    """The counts of all models."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCounts] = {}

    def of(self, model: str) -> ModelCounts:
        """Return the counts of a model that is served. For the loop's thread."""
        return self._models.setdefault(model, ModelCounts())

    def pieces(self, model: str) -> PieceCounts | None:
        """Return the counts of a model; None if it has had no chat and no completion. On any thread."""
        found = self._models.get(model)
        return None if found is None else found.pieces()

    def families(self, served: Collection[str]) -> list[ExposedFamily]:
        """Return the present figures of the models that are served, and forget the others. On any thread."""
        models = self._models.copy()
        for name in models.keys() - set(served):
            self._models.pop(name, None)
            del models[name]
        first, gaps, tokens = [], [], []
        for name, counts in models.items():
            labels = (("model", name),)
            first += counts.first.samples(labels, 10**9)
            gaps += counts.gaps.samples(labels, 10**9)
            for field, kind in _TOKENS.items():
                tokens.append(Sample("", (("kind", kind), *labels), counts.tokens[field]))
        return [
            ExposedFamily(
                "moonpool_openai_first_piece_seconds",
                "Time from a client's request for a chat or a completion to the first piece of the answer",
                "histogram",
                first,
            ),
            ExposedFamily(
                "moonpool_openai_piece_gap_seconds", "Time between two pieces of an answer", "histogram", gaps
            ),
            ExposedFamily(
                "moonpool_openai_tokens_total", "Tokens of prompts and answers, as models tell them", "counter", tokens
            ),
        ]
