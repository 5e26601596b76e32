"""Finds entities in texts: `TEXT` → `ENTITIES`, a JSON list of objects with `entity`, `score`, `text`, `start` and
`end`.
"""

from __future__ import annotations

import json
from typing import TypedDict

import numpy as np
import torch
from loading import Folder, longest, texts_in
from transformers import AutoModelForTokenClassification

from moonpool import Batch, Bytes


class Found(TypedDict):
    ENTITIES: Bytes[Batch, 1]


class TokenClassification:
    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.tokenizer = self.folder.tokenizer()
        if not self.tokenizer.is_fast:
            raise ValueError("the model has no tokenizer.json, which tells where in a text a token is")
        self.model = self.folder.model(AutoModelForTokenClassification)
        self.longest = longest(self.tokenizer, self.model.config)

    @torch.inference_mode()
    def __call__(self, TEXT: Bytes[Batch, 1]) -> Found:
        texts = texts_in(TEXT)
        tokens = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self.longest,
            return_tensors="pt",
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        offsets, special = tokens.pop("offset_mapping").tolist(), tokens.pop("special_tokens_mask").tolist()
        scores = self.model(**self.folder.batch(tokens)).logits.float().softmax(-1)
        values, places = (each.tolist() for each in scores.max(-1))
        rows = [
            json.dumps(self._entities(text, *each), ensure_ascii=False).encode("utf-8", "replace")
            for text, *each in zip(texts, offsets, special, places, values)
        ]
        return {"ENTITIES": np.array(rows, object).reshape(-1, 1)}

    def _entities(self, text: str, offsets: list, special: list, places: list, values: list) -> list[dict]:
        """Join the tokens of each entity: B- begins one, and I- or the same label goes on."""
        found: list[dict] = []
        last = ""
        for (start, end), is_special, place, value in zip(offsets, special, places, values):
            label = str(self.model.config.id2label.get(place, place))
            if is_special or label == "O" or start == end:
                last = "" if not is_special else last
                continue
            name = label[2:] if label[:2] in ("B-", "I-") else label
            if name == last and not label.startswith("B-"):
                entity = found[-1]
                entity["end"], entity["text"] = end, text[entity["start"] : end]
                entity["score"] = min(entity["score"], value)
            else:
                found.append({"entity": name, "score": value, "text": text[start:end], "start": start, "end": end})
            last = name
        return found
