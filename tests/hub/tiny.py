"""Makes tiny models of transformers, with seeded weights, as the files of a repository of the Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = (
    "<pad>",
    "<unk>",
    "<s>",
    "</s>",
    *[
        "a",
        "b",
        "c",
        "good",
        "bad",
        "day",
        "is",
        "the",
        "cat",
        "dog",
        "what",
        "this",
        "example",
        ".",
        "it",
        "was",
        "in",
        "on",
        "two",
    ],
)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}the {% endif %}"
)
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    found = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **names)
    found.chat_template = TEMPLATE
    return found


def saved(*parts: Any, **more: bytes) -> dict[str, bytes]:
    """Return the files that `save_pretrained` writes for a model and what goes with it."""
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            part.save_pretrained(folder)
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*")}
    return files | more


def bert(kind: str, **config: Any) -> dict[str, bytes]:
    """Return a BERT with the head of this class."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SMALL, **config)
    return saved(getattr(transformers, kind)(made), tokenizer())


def classifier() -> dict[str, bytes]:
    return bert("BertForSequenceClassification", id2label={0: "bad", 1: "good", 2: "so-so"})


def llama() -> dict[str, bytes]:
    import torch
    import transformers

    torch.manual_seed(0)
    made = transformers.LlamaConfig(
        vocab_size=len(WORDS), max_position_embeddings=64, bos_token_id=2, eos_token_id=3, pad_token_id=0, **SMALL
    )
    return saved(transformers.LlamaForCausalLM(made), tokenizer())


def vit() -> dict[str, bytes]:
    import torch
    import transformers

    torch.manual_seed(0)
    size = {"image_size": 32, "patch_size": 16}
    made = transformers.ViTConfig(id2label={0: "cat", 1: "dog"}, **size, **SMALL)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    return saved(transformers.ViTForImageClassification(made), processor)


def whisper() -> dict[str, bytes]:
    import torch
    import transformers

    torch.manual_seed(0)
    layers = {f"{each}_{what}": 1 for each in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    made = transformers.WhisperConfig(
        vocab_size=len(WORDS), d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=80,
        max_target_positions=16, pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, **layers,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(made)
    model.generation_config.update(max_length=8, begin_suppress_tokens=None, suppress_tokens=None)
    return saved(model, transformers.WhisperFeatureExtractor(), tokenizer())


def wav2vec2() -> dict[str, bytes]:
    import torch
    import transformers

    torch.manual_seed(0)
    made = transformers.Wav2Vec2Config(
        vocab_size=len(WORDS), conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, pad_token_id=0, **SMALL,
    )  # fmt: skip
    return saved(transformers.Wav2Vec2ForCTC(made), transformers.Wav2Vec2FeatureExtractor(), tokenizer())


MAKERS: dict[str, Callable[[], dict[str, bytes]]] = {
    "classifier": classifier,
    "llama": llama,
    "vit": vit,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
}
