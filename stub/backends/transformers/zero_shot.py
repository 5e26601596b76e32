"""Gives texts the labels that their clients name: `TEXT`, `LABELS` → `LABEL` and `SCORE`, the best label first."""

from __future__ import annotations

from typing import TypedDict

import numpy as np
import torch
from loading import Folder, longest, texts_in
from transformers import AutoModelForSequenceClassification

from moonpool import Batch, Bytes, Float32

HYPOTHESIS = "This example is {}."


class Labelled(TypedDict):
    LABEL: Bytes[Batch, :]
    SCORE: Float32[Batch, :]


class ZeroShotClassification:
    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.tokenizer = self.folder.tokenizer()
        self.model = self.folder.model(AutoModelForSequenceClassification)
        self.longest = longest(self.tokenizer, self.model.config)
        places = [place for place, name in self.model.config.id2label.items() if str(name).lower().startswith("entail")]
        if not places:
            raise ValueError("no label of the model begins with 'entail', which tells whether a label fits")
        self.place = places[0]

    @torch.inference_mode()
    def __call__(self, TEXT: Bytes[Batch, 1], LABELS: Bytes[Batch, :]) -> Labelled:
        rows, count = LABELS.shape
        names = texts_in(LABELS)
        texts = [text for text in texts_in(TEXT) for _ in range(count)]
        tokens = self.tokenizer(
            texts,
            [HYPOTHESIS.format(name) for name in names],
            padding=True,
            truncation="only_first",
            max_length=self.longest,
            return_tensors="pt",
        )
        logits = self.model(**self.folder.batch(tokens)).logits.float()
        scores = logits[:, self.place].reshape(rows, count).softmax(-1)
        values, places = scores.sort(descending=True)
        labels = np.array([name.encode() for name in names], object).reshape(rows, count)
        return {
            "LABEL": np.take_along_axis(labels, places.cpu().numpy(), 1),
            "SCORE": values.cpu().numpy().astype(np.float32),
        }
