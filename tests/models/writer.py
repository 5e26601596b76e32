"""Speaks OpenAI's API: the last message says what the answer does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from moonpool.openai import BadRequest, ChatRequest, CompletionRequest, Delta, RerankRequest, Usage, tool_call

from moonpool import Batch, Float32

FORGED = 'x\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n'


class Writer:
    def __init__(self) -> None:
        self.left: list[str] = []
        # The numbers of texts that `embed` got together.
        self.counts: list[int] = []

    async def chat(self, request: ChatRequest) -> AsyncIterator[Any]:
        said = request.messages[-1]["content"]
        what, _, rest = said.partition(" ")
        if what == "waits":
            try:
                yield "first"
                await asyncio.Event().wait()
            finally:
                self.left.append(rest)
        elif what == "left":
            yield ",".join(self.left)
        elif what == "floods":
            try:
                while True:
                    yield "x" * 10_000
                    await asyncio.sleep(0)
            finally:
                self.left.append(rest)
        elif what == "refuses":
            raise BadRequest("I will not", "messages")
        elif what == "raises":
            raise ValueError("no idea")
        elif what == "breaks":
            yield "half"
            raise ValueError("no idea")
        elif what == "dies":
            yield "half"
            os._exit(3)
        elif what == "forges":
            yield FORGED
        elif what == "odd":
            yield {"content": 5}
        elif what == "huge":
            yield Delta("x", logprobs={"content": [1 << 70]})
        elif what == "nothing":
            return
        elif what == "counts":
            yield "one two"
            yield Usage(3, 2)
        elif what == "calls":
            yield Delta(tool_calls=[tool_call("weather", '{"city":', call_id="call_123456789")])
            yield Delta(tool_calls=[tool_call(arguments='"Bern"}')])
            yield Delta(tool_calls=[tool_call("time", {"zone": 1}, index=1)])
        elif what == "chooses":
            for choice in range(request.choices):
                yield Delta(f"choice {choice}", index=choice)
            yield Delta(index=0, finish_reason="length")
        elif what == "thinks":
            yield Delta(reasoning_content="hm")
            yield Delta("so", logprobs={"content": [{"token": "so", "logprob": -0.5}]})
            yield Delta(" it is", logprobs={"content": [{"token": " it is", "logprob": -1.5}]})
        elif what == "tells":
            yield repr((request.id, request.temperature, request.stop, request.max_tokens, sorted(request)))
        else:
            for word in said.split(" "):
                yield word + " "

    def complete(self, request: CompletionRequest) -> list[str | Usage]:
        prompt = request.prompt
        # LangChain's completions do not work without usage.
        return [f"{prompt}!" if isinstance(prompt, str) else f"{prompt}", Usage(1, 1)]

    def embed(self, texts: list[str]) -> Float32[Batch, 4]:
        self.counts.append(len(texts))
        if "raises" in texts:
            raise ValueError("no idea")
        return np.array([[len(text), len(texts), 0.5, -1] for text in texts], np.float32)

    async def rerank(self, request: RerankRequest) -> list[float]:
        return [text.count(request.query) for text in request.documents]
