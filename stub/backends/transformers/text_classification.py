"""Gives texts labels: `TEXT` → `LABEL` and `SCORE`, the best label first."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import torch
from loading import Folder, best, longest, texts_in
from transformers import AutoModelForSequenceClassification

from moonpool import Batch, Bytes, Float32


class Labelled(TypedDict):
    LABEL: Bytes[Batch, :]
    SCORE: Float32[Batch, :]


class TextClassification:
    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.tokenizer = self.folder.tokenizer()
        self.model = self.folder.model(AutoModelForSequenceClassification)
        self.longest = longest(self.tokenizer, self.model.config)

    @torch.inference_mode()
    def __call__(self, TEXT: Bytes[Batch, 1]) -> Labelled:
        tokens = self.tokenizer(
            texts_in(TEXT), padding=True, truncation=True, max_length=self.longest, return_tensors="pt"
        )
        logits = self.model(**self.folder.batch(tokens)).logits.float()
        is_multiple = self.model.config.problem_type == "multi_label_classification"
        scores = logits.sigmoid() if is_multiple else logits.softmax(-1)
        labels, values = best(scores, self.model.config.id2label)
        return {"LABEL": np.array(labels, object), "SCORE": np.array(values, np.float32)}
