"""Makes vectors of texts: `/v1/embeddings`. The parts of a model of sentence-transformers are read here, by their
names, and that library is not needed.
"""

from __future__ import annotations

import json
import os

import numpy as np
import torch
from loading import Folder, longest
from safetensors.torch import load_file
from transformers import AutoModel

from moonpool import Batch, Float32

POOLINGS = ("mean", "cls", "max", "lasttoken")
ACTIVATIONS = {
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.linear.Identity": lambda rows: rows,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": torch.nn.functional.gelu,
}
MOST_JSON_BYTES = 1 << 20


class Embeddings:
    max_batch_size = 64

    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.tokenizer = self.folder.tokenizer()
        self.model = self.folder.model(AutoModel, **self._without_pooler())
        self.longest = longest(self.tokenizer, self.model.config)
        self.pooling, self.steps = "mean", [normalised]
        if self.folder.has("modules.json"):
            self._read_modules()

    def _without_pooler(self) -> dict:
        # A layer that nothing here uses, and which the files of many models lack.
        kinds = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "data2vec-text")
        return {"add_pooling_layer": False} if self._json("config.json").get("model_type") in kinds[:4] else {}

    def _json(self, *path: str) -> dict | list:
        with open(os.path.join(self.folder.path, *path), "rb") as file:
            return json.loads(file.read(MOST_JSON_BYTES))

    def _read_modules(self) -> None:
        self.steps = []
        for each in self._json("modules.json"):
            kind, place = each["type"].rpartition(".")[2], each.get("path", "")
            if kind == "Pooling":
                self.pooling = pooling_of(self._json(place, "config.json"))
            elif kind == "Normalize":
                self.steps.append(normalised)
            elif kind == "Dense":
                self.steps.append(self._dense(place))
        if self.folder.has("sentence_bert_config.json"):
            length = self._json("sentence_bert_config.json").get("max_seq_length")
            if isinstance(length, int) and length > 0:
                self.longest = min(self.longest, length)

    def _dense(self, place: str):
        weights = load_file(os.path.join(self.folder.path, place, "model.safetensors"), device=self.folder.device)
        name = self._json(place, "config.json").get("activation_function", "torch.nn.modules.activation.Tanh")
        if name not in ACTIVATIONS:
            raise ValueError(
                f"{place}/config.json names the function {name!r:.100}; known are {', '.join(ACTIVATIONS)}"
            )
        matrix, bias = weights["linear.weight"].float(), weights.get("linear.bias")
        bias = None if bias is None else bias.float()
        return lambda rows: ACTIVATIONS[name](torch.nn.functional.linear(rows, matrix, bias))

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> Float32[Batch, :]:
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=self.longest, return_tensors="pt")
        batch = self.folder.batch(tokens)
        states = self.model(**batch).last_hidden_state.float()
        rows = pooled(states, batch["attention_mask"], self.pooling)
        for step in self.steps:
            rows = step(rows)
        return np.ascontiguousarray(rows.cpu().numpy(), np.float32)


def normalised(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def pooling_of(config: dict) -> str:
    """Return how a model joins the states of its tokens. Raises ValueError for a way that is not known."""
    if isinstance(config.get("pooling_mode"), str):
        named = [config["pooling_mode"]]
    else:
        named = [
            key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
            for key, value in config.items()
            if key.startswith("pooling_mode_") and value is True
        ]
    if len(named) != 1 or named[0] not in POOLINGS:
        raise ValueError(f"the pooling {', '.join(named) or 'is missing'} is none of {', '.join(POOLINGS)}")
    return named[0]


def pooled(states: torch.Tensor, mask: torch.Tensor, how: str) -> torch.Tensor:
    """Join the states of the tokens of each text, without those that pad it."""
    here = mask.unsqueeze(-1)
    if how == "cls":
        return states[torch.arange(len(states)), mask.argmax(1)]
    if how == "lasttoken":
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        return states[torch.arange(len(states)), last]
    if how == "max":
        return states.masked_fill(here == 0, -torch.inf).max(1).values
    return (states * here).sum(1) / here.sum(1).clamp(min=1)
