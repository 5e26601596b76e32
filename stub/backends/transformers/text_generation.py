"""Writes texts, piece by piece: `/v1/chat/completions` and `/v1/completions`.

Theory of operation. One answer is generated at a time, on a thread of its own. Others wait in the event loop, where a
client that leaves ends its wait. The template of the chat came with the weights: transformers renders it in a sandbox
of Jinja's, here and never in the server. A prompt that takes longer than a batch may (`MOONPOOL_EXECUTE_TIMEOUT_S`)
ends the process, as nothing else ends a thread, and all others wait for it. Pieces go from the thread to the event loop
by its queue. `stopped` ends the thread at its next token; the turn passes on when the thread has ended.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial

import torch
from loading import Folder, longest
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import TextStreamer

from moonpool.openai import BadRequest, ChatRequest, CompletionRequest, Delta, Usage

MOST_TOKENS = 512
PROMPT_S = 600.0


class TextGeneration:
    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.tokenizer = self.folder.tokenizer()
        self.model = self.folder.model(AutoModelForCausalLM)
        self.longest = longest(self.tokenizer, self.model.config)
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if isinstance(limit, int) and limit > 0:
            self.longest = limit
        parameters = config["parameters"]
        self.prompt_s = float(parameters.get("MOONPOOL_EXECUTE_TIMEOUT_S", {}).get("string_value", PROMPT_S))
        # Made in the event loop that it belongs to.
        self.turn: asyncio.Lock | None = None

    async def chat(self, request: ChatRequest) -> AsyncIterator[str | Delta | Usage]:
        if self.tokenizer.chat_template is None:
            raise BadRequest("the model has no chat template; ask for a completion")
        prompt = partial(
            self.tokenizer.apply_chat_template,
            request.messages,
            tools=request.tools or None,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        async for piece in self._answer(request, prompt):
            yield piece

    async def complete(self, request: CompletionRequest) -> AsyncIterator[str | Delta | Usage]:
        given = request.prompt
        if isinstance(given, str):
            prompt = partial(self.tokenizer, given, return_tensors="pt")
            if request.echo:
                yield given
        else:
            if not given or not all(0 <= each < len(self.tokenizer) for each in given):
                raise BadRequest(f"the tokens must be numbers below {len(self.tokenizer)}", "prompt")
            prompt = partial(tokens_of, given)
        async for piece in self._answer(request, prompt):
            yield piece

    async def _answer(
        self, request: ChatRequest | CompletionRequest, prompt: Callable
    ) -> AsyncIterator[str | Delta | Usage]:
        if request.choices > 1:
            raise BadRequest("the model gives one answer at a time", "n")
        if self.turn is None:
            self.turn = asyncio.Lock()
        async with self.turn:
            generation = Generation(self, request, prompt)
            worker = asyncio.ensure_future(asyncio.to_thread(generation.run))
            overdue = generation.loop.call_later(self.prompt_s, give_up, self.prompt_s, generation.has_prompt)
            try:
                async for piece in generation.pieces():
                    yield piece
                await worker
                yield Delta(finish_reason=generation.finish_reason)
                yield Usage(generation.prompt_tokens, generation.completion_tokens)
            finally:
                generation.stopped.set()
                # The next one may begin when the thread is free.
                await asyncio.wait([worker])
                overdue.cancel()
                worker.cancelled() or worker.exception()


class Generation(TextStreamer):
    """One answer on its way from the thread that makes it to the event loop."""

    def __init__(self, owner: TextGeneration, request: ChatRequest | CompletionRequest, prompt: Callable) -> None:
        super().__init__(owner.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.owner, self.request, self.prompt = owner, request, prompt
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.stopped, self.has_prompt = threading.Event(), threading.Event()
        self.stop = [text for text in request.stop if text]
        # What may be the beginning of a text that ends the answer.
        self.held = ""
        self.finish_reason = "stop"
        self.prompt_tokens = self.completion_tokens = 0

    async def pieces(self) -> AsyncIterator[str]:
        while (piece := await self.queue.get()) is not None:
            yield piece

    def run(self) -> None:
        try:
            self._run()
        finally:
            self._send(None)

    @torch.inference_mode()
    def _run(self) -> None:
        owner, request = self.owner, self.request
        try:
            tokens = owner.folder.batch(self.prompt())
        except Exception as error:  # a template may raise anything
            raise BadRequest(f"the prompt cannot be made: {type(error).__name__}: {error}"[:1000]) from None
        self.has_prompt.set()
        self.prompt_tokens = tokens["input_ids"].shape[1]
        room = owner.longest - self.prompt_tokens
        if room < 1:
            raise BadRequest(f"the prompt has {self.prompt_tokens} tokens, and the model takes {owner.longest - 1}")
        most = min(room, request.max_tokens or MOST_TOKENS)
        if request.seed is not None:
            torch.manual_seed(request.seed)
        chosen = {"temperature": request.temperature, "top_p": request.top_p}
        samples = request.temperature != 0
        found = owner.model.generate(
            **tokens,
            streamer=self,
            stopping_criteria=[self._is_over],
            max_new_tokens=most,
            do_sample=samples,
            pad_token_id=owner.tokenizer.pad_token_id,
            **({key: value for key, value in chosen.items() if value is not None} if samples else {}),
        )
        self.completion_tokens = found.shape[1] - self.prompt_tokens
        if self.completion_tokens >= most and not self.stopped.is_set():
            self.finish_reason = "length"

    def _is_over(self, tokens: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        is_over = self.stopped.is_set() or self.request.is_cancelled
        return torch.full((len(tokens),), is_over, device=tokens.device)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.stopped.is_set():
            return
        self.held += text
        places = [place for each in self.stop if (place := self.held.find(each)) >= 0]
        if places:
            self.held = self.held[: min(places)]
            self.stopped.set()
        kept = 0 if stream_end or places else self._beginning()
        ready, self.held = self.held[: len(self.held) - kept], self.held[len(self.held) - kept :]
        if ready:
            self._send(ready)

    def _beginning(self) -> int:
        """Return how many letters at the end may begin a text that ends the answer."""
        sizes = [size for each in self.stop for size in range(1, len(each)) if self.held.endswith(each[:size])]
        return max(sizes, default=0)

    def _send(self, piece: str | None) -> None:
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, piece)
        except RuntimeError:  # the loop is closed, at the end of the process
            self.stopped.set()


def tokens_of(numbers: list[int]) -> dict:
    return {"input_ids": torch.tensor([numbers]), "attention_mask": torch.ones(1, len(numbers), dtype=torch.long)}


def give_up(prompt_s: float, has_prompt: threading.Event) -> None:
    """End the process if its prompt is still being made."""
    if not has_prompt.is_set():
        sys.stderr.write(
            f"No prompt within {prompt_s:g} s: its chat template or its tokenizer takes too long. Ending.\n"
        )
        sys.stderr.flush()
        os._exit(1)
