"""Chats with a model of transformers: the one in the folder `weights` beside this file, or a tiny one with random
weights, whose answers make no sense.

A model of yours: put what `save_pretrained` writes for model and tokenizer into `weights`.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TextIteratorStreamer

from moonpool.openai import ChatRequest, Usage

WEIGHTS = Path(__file__).parent / "weights"
MOST_TOKENS = 64


class TinyChat:
    def __init__(self):
        if WEIGHTS.exists():
            self.tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
            self.model = AutoModelForCausalLM.from_pretrained(WEIGHTS)
        else:
            self.tokenizer, self.model = tiny()
        self.model.eval()

    def chat(self, request: ChatRequest) -> Iterator[str | Usage]:
        prompt = self.tokenizer.apply_chat_template(
            request.messages, tools=request.tools or None, add_generation_prompt=True, return_tensors="pt",
            return_dict=True,
        )  # fmt: skip
        pieces = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        found = []

        def has_left(tokens, *_, **__) -> torch.Tensor:
            return torch.full((len(tokens),), request.is_cancelled)

        def generate() -> None:
            if request.seed is not None:
                torch.manual_seed(request.seed)
            try:
                found.append(self.model.generate(
                    **prompt,
                    streamer=pieces,
                    stopping_criteria=[has_left],
                    max_new_tokens=request.max_tokens or MOST_TOKENS,
                    do_sample=request.temperature != 0,
                    **({"temperature": request.temperature} if request.temperature else {}),
                ))  # fmt: skip
            finally:
                pieces.end()

        thread = threading.Thread(target=generate)
        thread.start()
        yield from filter(None, pieces)
        thread.join()
        if not found:
            raise RuntimeError("generating failed; the log has the reason")
        size = prompt["input_ids"].shape[1]
        yield Usage(size, found[0].shape[1] - size)


def tiny():
    """Make a tokenizer of bytes, and a model with 50,000 random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<end>", *letters])}
    tokens = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return tokenizer, LlamaForCausalLM(config)
