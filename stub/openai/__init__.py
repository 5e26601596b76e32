"""Serves models that speak OpenAI's API: what their methods get and yield.

Programs and models import these names from `moonpool.openai`.

    from collections.abc import AsyncIterator

    from moonpool import Batch, Float32
    from moonpool.openai import ChatRequest

    class Writer:
        async def chat(self, request: ChatRequest) -> AsyncIterator[str]:
            yield "Hello, "
            yield request.messages[-1]["content"]

        def embed(self, texts: list[str]) -> Float32[Batch, 384]:
            return self.encoder.encode(texts)

Each method that a class has is an endpoint: `chat`, `complete`, `embed`, `rerank`, `transcribe`.
"""

from __future__ import annotations

import sys

from moonpool.stub.openai.pieces import BadRequest, Delta, Segment, Usage, tool_call
from moonpool.stub.openai.requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    RerankRequest,
    TranscriptionRequest,
)

__all__ = [
    "BadRequest",
    "ChatRequest",
    "CompletionRequest",
    "Delta",
    "OpenAIRequest",
    "RerankRequest",
    "Segment",
    "TranscriptionRequest",
    "Usage",
    "tool_call",
]


def publish() -> None:
    """Let the model import these names from `moonpool.openai`, unless that module is there."""
    module = sys.modules[__name__]
    if sys.modules.setdefault("moonpool.openai", module) is module:
        sys.modules["moonpool"].openai = module  # type: ignore[attr-defined]
