"""Which of these sentences mean the same?

    python examples/closest_sentences.py [SENTENCE ...]

Embeds real sentences with a real model, MiniLM, which runs in an environment of its own;
models_with_torch/sentence_embedding/config.pbtxt says how to make that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import moonpool

SENTENCES = [
    "A man is eating a piece of bread.",
    "The new film by that director is dreadful.",
    "Interest rates were raised by half a percent.",
    "Somebody is having a sandwich.",
    "The central bank has made borrowing more expensive.",
    "The cat sleeps on the warm windowsill.",
    "I did not like her latest movie at all.",
    "A kitten is dozing in the sun.",
]


def main(sentences: list[str]) -> int:
    models = Path(__file__).parent / "models_with_torch"
    texts = np.array([[sentence.encode()] for sentence in sentences], dtype=object)
    try:
        with moonpool.Runtime(models, models=["sentence_embedding"], listener=moonpool.Progress()) as runtime:
            embeddings = runtime.infer("sentence_embedding", {"TEXT": texts})["EMBEDDING"].copy()
    except moonpool.MoonpoolError as error:
        print(error, file=sys.stderr)
        return 1

    # The vectors have length 1, so their products are the cosines of the angles between them.
    closeness = embeddings @ embeddings.T
    np.fill_diagonal(closeness, -1)
    for sentence, row in zip(sentences, closeness, strict=True):
        closest = int(row.argmax())
        print(f"{row[closest]:.2f}  {sentence}\n      {sentences[closest]}")
    return 0


if __name__ == "__main__":
    given = sys.argv[1:] or SENTENCES
    if len(given) < 2:
        sys.exit("give at least two sentences, or none for the examples")
    sys.exit(main(given))
