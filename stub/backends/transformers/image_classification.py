"""Gives images labels: `IMAGE`, the bytes of a file, → `LABEL` and `SCORE`, the best label first."""

from __future__ import annotations

import io
import warnings
from typing import TypedDict

import numpy as np
import torch
from loading import Folder, best
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from moonpool import Batch, Bytes, Float32

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# More is refused before it is decoded, also below twice as many, where the library only warns.
Image.MAX_IMAGE_PIXELS = 64_000_000
warnings.simplefilter("error", Image.DecompressionBombWarning)


class Labelled(TypedDict):
    LABEL: Bytes[Batch, :]
    SCORE: Float32[Batch, :]


class ImageClassification:
    def __init__(self, config: dict) -> None:
        self.folder = Folder(config)
        self.processor = AutoImageProcessor.from_pretrained(self.folder.path, **self.folder.arguments)
        self.model = self.folder.model(AutoModelForImageClassification)

    @torch.inference_mode()
    def __call__(self, IMAGE: Bytes[Batch, 1]) -> Labelled:
        images = [Image.open(io.BytesIO(each), formats=FORMATS).convert("RGB") for each in IMAGE.reshape(-1)]
        pixels = self.processor(images, return_tensors="pt")
        pixels = {key: value.to(self.folder.device) for key, value in pixels.items()}
        scores = self.model(**pixels).logits.float().softmax(-1)
        labels, values = best(scores, self.model.config.id2label)
        return {"LABEL": np.array(labels, object), "SCORE": np.array(values, np.float32)}
