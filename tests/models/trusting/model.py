"""Loads a repository as other programs do, with the library that its parameter `way` names, and answers with what came
of it: the library's error, and the outcomes of what a payload tried (`tests/hub/payload.py`).
"""

import json
import os
import sys
import tempfile

import numpy as np
import triton_python_backend_utils as pb_utils


def by_transformers(folder):
    from transformers import AutoModel

    AutoModel.from_pretrained(folder, trust_remote_code=False)


def by_sentence_transformers(folder):
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(folder, trust_remote_code=False, device="cpu")


def by_mlx(folder):
    from pathlib import Path

    from mlx_lm.utils import load_model

    load_model(Path(folder), lazy=True, strict=False)


WAYS = {"transformers": by_transformers, "sentence-transformers": by_sentence_transformers, "mlx-lm": by_mlx}


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        os.environ["HF_ENDPOINT"] = parameters["hub"]["string_value"]
        os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        os.environ["HF_HOME"] = tempfile.mkdtemp()
        self.error = ""
        try:
            WAYS[parameters["way"]["string_value"]](
                os.path.join(args["model_repository"], args["model_version"], "files")
            )
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def execute(self, requests):
        said = json.dumps({"error": self.error, "outcomes": getattr(sys, "outcomes_of_payload", None)}).encode()
        tensor = pb_utils.Tensor("SAID", np.array([said], np.object_))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]
