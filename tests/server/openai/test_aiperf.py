"""NVIDIA's AIPerf, unchanged, measures a server: each kind of request is answered, and none is an error."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.server.openai.test_clients import server
from tests.server.running import RunningServer

__all__ = ["server"]

# `bash .ci/run aiperf` makes it.
ENVIRONMENT = Path(__file__).parents[3] / ".venv-aiperf"
PATIENCE_S = 170
# AIPerf counts tokens with a tokenizer, and would fetch one.
TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokens = Tokenizer(models.BPE({each: at for at, each in enumerate(["<end>", *letters])}, merges=[]))
tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<end>")
PreTrainedTokenizerFast(tokenizer_object=tokens, **ends).save_pretrained(sys.argv[1])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * PATIENCE_S),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="bash .ci/run aiperf installs AIPerf"),
]


def run(tmp_path: Path, *command: str) -> None:
    ended = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]


@pytest.mark.promise("OpenAI", "AIPerf measures chats, completions, embeddings and rankings unchanged.")
@pytest.mark.parametrize("kind", ["chat", "completions", "embeddings", "cohere_rankings"])
def test_aiperf_measures_a_server(server: RunningServer, tmp_path: Path, kind: str) -> None:
    is_stream = kind in ("chat", "completions")
    run(tmp_path, str(ENVIRONMENT / "bin" / "python"), "-c", TOKENIZER, "tokenizer")

    run(
        tmp_path,
        str(ENVIRONMENT / "bin" / "aiperf"), "profile", "--model", "writer", "--url", f"http://{server.http}",
        "--endpoint-type", kind, "--tokenizer", str(tmp_path / "tokenizer"), "--request-count", "20",
        "--concurrency", "4", "--ui", "none", "--output-artifact-dir", "found", *["--streaming"] * is_stream,
    )  # fmt: skip

    found = json.loads((tmp_path / "found" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 20
    assert found["error_summary"] == []
    assert ("time_to_first_token" in found) == is_stream
