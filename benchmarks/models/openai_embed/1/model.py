"""Takes as long for 32 texts as for one, as models on an accelerator nearly do."""

import time

import numpy as np

TAKES_S = 0.02


class Embed:
    max_batch_size = 32

    def embed(self, texts):
        time.sleep(TAKES_S)
        return np.full((len(texts), 1024), len(texts[0]), np.float32)
