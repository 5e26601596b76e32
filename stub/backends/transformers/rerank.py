"""Scores documents for a query: `/v1/rerank`."""

from __future__ import annotations

import torch
from loading import Folder, longest
from transformers import AutoModelForSequenceClassification

from moonpool.openai import RerankRequest

MOST_AT_ONCE = 32


class Rerank:
    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.tokenizer = self.folder.tokenizer()
        self.model = self.folder.model(AutoModelForSequenceClassification)
        self.longest = longest(self.tokenizer, self.model.config)

    @torch.inference_mode()
    def rerank(self, request: RerankRequest) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(request.documents), MOST_AT_ONCE):
            documents = request.documents[start : start + MOST_AT_ONCE]
            tokens = self.tokenizer(
                [request.query] * len(documents),
                documents,
                padding=True,
                truncation=True,
                max_length=self.longest,
                return_tensors="pt",
            )
            logits = self.model(**self.folder.batch(tokens)).logits.float()
            scores += logits[:, 0].sigmoid().tolist()
        return scores
