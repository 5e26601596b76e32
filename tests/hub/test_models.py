"""Tiny models of transformers from the stand-in, and attacks by repositories, at `strict` and at `off`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import wave
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.hub import tiny
from tests.hub.payload import payload
from tests.hub.stand_in import Hub
from tests.waiting import wait_until

import moonpool
from moonpool.errors import LoadFailed

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: bash .ci/run hub"),
    # Importing torch and transformers takes a minute where others are at work.
    pytest.mark.timeout(900),
]
OPTIONS = {"MOONPOOL_LOAD_TIMEOUT_S": "600"}


@pytest.fixture(params=["strict", "off"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runtime(hub: Hub) -> Iterator[moonpool.Runtime]:
    assert hub.url
    with moonpool.Runtime() as made:
        yield made


def load(runtime: moonpool.Runtime, hub: Hub, files: dict[str, bytes], level: str = "strict", **options: str) -> None:
    hub.put("o/m", files)
    runtime.load("m", "hf://o/m", sandbox=level, options=OPTIONS | options)


def texts(*values: bytes) -> Any:
    return np.array([[value] for value in values], object)


@pytest.mark.promise(
    "Models of the Hub",
    "A repository of the Hub with weights in safetensors answers without any code of its own or of the operator's.",
)
def test_texts_get_labels(runtime: moonpool.Runtime, hub: Hub) -> None:
    load(runtime, hub, tiny.classifier())
    found = runtime.infer("m", {"TEXT": texts(b"the cat is good", b"bad day")})
    assert set(found["LABEL"][0]) == {b"good", b"bad", b"so-so"}
    assert found["SCORE"].sum(1) == pytest.approx([1, 1])
    assert (np.diff(found["SCORE"]) <= 0).all()


def test_labels_of_the_client_are_ranked(runtime: moonpool.Runtime, hub: Hub) -> None:
    load(runtime, hub, tiny.bert("BertForSequenceClassification", id2label={0: "no", 1: "entailment"}))
    asked = {"TEXT": texts(b"the cat is good"), "LABELS": np.array([[b"cat", b"dog", b"day"]], object)}
    found = runtime.infer("m", asked)
    assert set(found["LABEL"][0]) == {b"cat", b"dog", b"day"}
    assert found["SCORE"].sum() == pytest.approx(1)


def test_entities_are_found(runtime: moonpool.Runtime, hub: Hub) -> None:
    load(runtime, hub, tiny.bert("BertForTokenClassification", id2label={0: "O", 1: "B-X", 2: "I-X"}))
    (text,) = runtime.infer("m", {"TEXT": texts(b"the cat is good")})["ENTITIES"][0]
    for each in json.loads(text):
        assert "the cat is good"[each["start"] : each["end"]] == each["text"]
        assert each["entity"] == "X"


def test_texts_get_vectors(runtime: moonpool.Runtime, hub: Hub) -> None:
    load(runtime, hub, tiny.bert("BertModel"))
    together = runtime.embed("m", ["the cat", "a dog is good"])
    assert together.shape == (2, 16)
    assert np.linalg.norm(together, axis=1) == pytest.approx([1, 1], abs=1e-5)
    # Padding changes nothing.
    assert runtime.embed("m", ["the cat"])[0] == pytest.approx(together[0], abs=1e-5)


def test_a_chat_is_answered_in_pieces(runtime: moonpool.Runtime, hub: Hub) -> None:
    load(runtime, hub, tiny.llama())
    messages = [{"role": "user", "content": "the cat"}]
    whole = runtime.chat("m", messages, temperature=0, max_tokens=8)
    choice = whole["choices"][0]
    assert choice["finish_reason"] in ("length", "stop")
    assert 0 < whole["usage"]["completion_tokens"] <= 8
    pieces = runtime.chat("m", messages, temperature=0, max_tokens=8, stream=True)
    text = "".join(each["choices"][0]["delta"].get("content") or "" for each in pieces if each["choices"])
    assert text == choice["message"]["content"]
    words = text.split()
    if len(words) > 1:
        stopped = runtime.chat("m", messages, temperature=0, max_tokens=8, stop=[words[1]])
        assert words[1] not in stopped["choices"][0]["message"]["content"].split()


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return an image that claims this size."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(data)),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_images_get_labels_and_a_bomb_is_refused(runtime: moonpool.Runtime, hub: Hub) -> None:
    load(runtime, hub, tiny.vit())
    image = png(32, 32, (b"\0" + b"\x80" * 96) * 32)
    before = runtime.infer("m", {"IMAGE": texts(image)})
    assert set(before["LABEL"][0]) == {b"cat", b"dog"}
    for bad in (png(60_000, 60_000), b"", b"GIF89a", b"<svg/>"):
        with pytest.raises(
            moonpool.MoonpoolError, match=r"DecompressionBomb|UnidentifiedImage|OSError|image file is truncated"
        ):
            runtime.infer("m", {"IMAGE": texts(bad)})
    assert runtime.infer("m", {"IMAGE": texts(image)})["SCORE"] == pytest.approx(before["SCORE"])


def wav(seconds: float, rate: int = 8000) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(2 * int(seconds * rate)))
    return made.getvalue()


@pytest.mark.parametrize("maker", [tiny.wav2vec2, tiny.whisper], ids=["letters", "words"])
def test_speech_is_written_down(runtime: moonpool.Runtime, hub: Hub, maker: Any) -> None:
    load(runtime, hub, maker())

    def heard(file: bytes) -> list[dict[str, Any]]:
        asked = {"request": [json.dumps({"model": "m"})], "file": np.array([file], object)}
        return [json.loads(each["transcription"][0]) for each in runtime.stream("m", asked)]

    assert any("content" in each for each in heard(wav(1.0)))
    lying = bytearray(wav(0.5))
    lying[40:44] = b"\xff\xff\xff\xff"
    heard(bytes(lying))
    for bad in (b"RIFF", b"none", b""):
        with pytest.raises(moonpool.MoonpoolError, match=r"the recording cannot be read|not WAV"):
            heard(bad)


# Attacks

EVIL = """
import pathlib
pathlib.Path({mark!r}).write_text("here")
from transformers import BertConfig
class EvilConfig(BertConfig):
    model_type = "evil"
"""


def evil(mark: Path) -> dict[str, bytes]:
    """Return a model whose configuration is a class of its own, in a file that writes a mark."""
    files = tiny.classifier()
    config = json.loads(files["config.json"]) | {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    return files | {"config.json": json.dumps(config).encode(), "evil.py": EVIL.format(mark=str(mark)).encode()}


@pytest.mark.promise(
    "Models of the Hub",
    "Code of a repository (`auto_map`) is neither copied nor run. Where the operator grants its commit, it runs in the "
    "sandbox of the model.",
)
@pytest.mark.parametrize("is_granted", [False, True], ids=["", "granted"])
def test_code_of_a_repository(
    runtime: moonpool.Runtime, hub: Hub, level: str, is_granted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    files = evil(mark)
    commit = hub.put("o/m", files)
    with pytest.raises(LoadFailed) as raised:
        load(runtime, hub, files, level, **({"MOONPOOL_REMOTE_CODE": commit} if is_granted else {}))
    # At `off`, the attack succeeds: it is one.
    assert mark.exists() == (is_granted and level == "off")
    if is_granted and level == "strict":
        assert re.search("PermissionError|FileNotFoundError|Read-only file system", str(raised.value))
    assert "auto_map names 'evil.EvilConfig'" in caplog.text


OWN = """
import json
from transformers import BertConfig, BertForSequenceClassification

class EvilConfig(BertConfig):
    model_type = "evil"

    def __init__(self, **more):
        super().__init__(**more)
        self.id2label = {0: json.dumps(sys.outcomes_of_payload), 1: "\\x1b[31mred", 2: "\\ud800"}

class EvilModel(BertForSequenceClassification):
    config_class = EvilConfig
"""


@pytest.mark.promise(
    "Models of the Hub", "A model whose code was granted works, and gets nothing outside of its sandbox at `strict`."
)
def test_code_that_was_granted_serves_and_gets_nothing(
    runtime: moonpool.Runtime, hub: Hub, level: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    tries: dict[str, dict[str, Any]] = {
        "files.read": {"path": str(tmp_path / "secret")},
        "files.write": {"path": str(tmp_path / "mark"), "text": "here"},
        "network.listen": {},
        "processes.spawn": {},
        "processes.signal_to": {"pid": os.getpid()},
    }
    files = tiny.classifier()
    named = {"AutoConfig": "evil.EvilConfig", "AutoModelForSequenceClassification": "evil.EvilModel"}
    config = json.loads(files["config.json"]) | {"model_type": "evil", "auto_map": named}
    files |= {"config.json": json.dumps(config).encode(), "evil.py": payload(tries) + OWN.encode()}
    commit = hub.put("o/m", files)
    load(runtime, hub, files, level, MOONPOOL_REMOTE_CODE=commit)
    labels = runtime.infer("m", {"TEXT": texts(b"the cat is good")})["LABEL"][0]
    (outcomes,) = [json.loads(each) for each in labels if each.startswith(b"{")]
    assert outcomes.keys() == tries.keys()
    if level == "off":
        assert set(outcomes.values()) == {"done"}
    else:
        assert "done" not in outcomes.values(), outcomes
    assert (tmp_path / "mark").exists() == (level == "off")


@pytest.mark.parametrize("is_granted", [False, True], ids=["", "granted"])
def test_code_of_a_second_repository_is_never_fetched(
    runtime: moonpool.Runtime, hub: Hub, level: str, is_granted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    files = evil(mark)
    hub.put("evil/code", {"evil.py": files.pop("evil.py")})
    config = json.loads(files["config.json"]) | {"auto_map": {"AutoConfig": "evil/code--evil.EvilConfig"}}
    files["config.json"] = json.dumps(config).encode()
    commit = hub.put("o/m", files)
    # It says that it may not ask anybody. What for is in the log.
    with pytest.raises(LoadFailed, match=r"evil|couldn't connect"):
        load(runtime, hub, files, level, **({"MOONPOOL_REMOTE_CODE": commit} if is_granted else {}))
    assert not [path for path in hub.asked if "evil" in path]
    assert "auto_map names 'evil/code--evil.EvilConfig'" in caplog.text
    assert not mark.exists()


def test_code_of_a_tokenizer_does_not_run(
    runtime: moonpool.Runtime, hub: Hub, level: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = tmp_path / "mark"
    files = tiny.classifier() | {"evil.py": evil(mark)["evil.py"]}
    named = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    config = json.loads(files["tokenizer_config.json"]) | {"auto_map": named, "tokenizer_class": "EvilTokenizer"}
    with contextlib.suppress(LoadFailed):
        load(runtime, hub, files | {"tokenizer_config.json": json.dumps(config).encode()}, level)
    assert "tokenizer_config.json: auto_map names 'evil.EvilTokenizer'" in caplog.text
    assert not mark.exists()


def test_a_kernel_of_another_repository_is_not_fetched(
    runtime: moonpool.Runtime, hub: Hub, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = tiny.classifier()
    config = json.loads(files["config.json"]) | {"_attn_implementation_internal": "evil/kernel"}
    hub.put("evil/kernel", {"build/torch-universal/kernel/__init__.py": b"raise SystemExit"})
    load(runtime, hub, files | {"config.json": json.dumps(config).encode()}, level)
    assert not [path for path in hub.asked if "evil" in path]
    assert "_attn_implementation_internal names 'evil/kernel'" in caplog.text


class Pickled:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.mark),)


def test_a_pickle_that_was_granted_runs_nothing(
    runtime: moonpool.Runtime, hub: Hub, level: str, tmp_path: Path
) -> None:
    import torch

    made = io.BytesIO()
    torch.save({"weight": Pickled(str(tmp_path / "mark"))}, made)
    files = tiny.classifier() | {"pytorch_model.bin": made.getvalue()}
    del files["model.safetensors"]
    commit = hub.put("o/m", files)
    with pytest.raises(LoadFailed, match=r"pytorch_model\.bin was not unpickled: it would call .*Path"):
        load(runtime, hub, files, level, MOONPOOL_PICKLED_WEIGHTS=commit)
    assert not (tmp_path / "mark").exists()


def header(claim: int) -> bytes:
    return struct.pack("<Q", claim) + b"{}"


def tensors(places: dict[str, tuple[int, int]], size_bytes: int) -> bytes:
    """Return a file of safetensors whose tensors lie at these places."""
    rows = {name: {"dtype": "U8", "shape": [end - at], "data_offsets": [at, end]} for name, (at, end) in places.items()}
    text = json.dumps(rows).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size_bytes)


WRONG_WEIGHTS = [
    header(1 << 63), header(100), b"", b"\x02\0\0\0\0\0\0\0{}", tensors({"a": (0, 8), "b": (4, 12)}, 12),
    tensors({"a": (0, 8), "b": (16, 24)}, 24), tensors({"a": (0, 1 << 50)}, 8), tensors({"a": (8, 0)}, 8),
    tensors({f"t{number}": (0, 0) for number in range(200_000)}, 0),
]  # fmt: skip


def test_weights_that_lie_are_refused(runtime: moonpool.Runtime, hub: Hub) -> None:
    files = tiny.classifier()
    for weights in WRONG_WEIGHTS:
        with pytest.raises(LoadFailed, match=r"(?i)safetensor|header|no fitting weights|size|overflow|negative"):
            load(runtime, hub, files | {"model.safetensors": weights})


@pytest.mark.parametrize(
    "lie",
    [{"vocab_size": 1_000_000_000}, {"architectures": ["BertForTokenClassification"]}, {"num_hidden_layers": 2}],
    ids=["size", "task", "layers"],
)
def test_a_configuration_that_lies_is_refused(runtime: moonpool.Runtime, hub: Hub, lie: dict[str, Any]) -> None:
    files = tiny.bert("BertModel")
    config = json.loads(files["config.json"]) | lie
    with pytest.raises(LoadFailed, match=r"no fitting weights|size mismatch|memory|mismatch"):
        load(runtime, hub, files | {"config.json": json.dumps(config).encode()}, MOONPOOL_MEMORY_LIMIT_BYTES="2G")


def test_templates_and_tokenizers_harm_their_request_alone(runtime: moonpool.Runtime, hub: Hub) -> None:
    template = (
        "{% set said = messages[0].content %}{% if said == 'class' %}{{ ''.__class__.__mro__ }}"
        "{% elif said == 'file' %}{% include '/etc/passwd' %}"
        "{% elif said == 'memory' %}{{ 'a' * 10**11 }}{% else %}the cat{% endif %}"
    )
    load(runtime, hub, tiny.llama() | {"chat_template.jinja": template.encode()}, MOONPOOL_MEMORY_LIMIT_BYTES="3G")
    for said, why in (("class", "unsafe|__class__"), ("file", "loader|prompt"), ("memory", "MemoryError|prompt")):
        with pytest.raises(moonpool.MoonpoolError, match=why):
            runtime.chat("m", [{"role": "user", "content": said}], max_tokens=2)
    assert runtime.chat("m", [{"role": "user", "content": "fine"}], max_tokens=2)["choices"]


def test_a_template_without_an_end_is_ended(runtime: moonpool.Runtime, hub: Hub) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = f"{{% if messages[0].content == 'time' %}}{loop}{{% else %}}the cat{{% endif %}}"
    load(runtime, hub, tiny.llama() | {"chat_template.jinja": template.encode()}, MOONPOOL_EXECUTE_TIMEOUT_S="20")
    with pytest.raises(moonpool.MoonpoolError, match="No prompt within 20 s"):
        runtime.chat("m", [{"role": "user", "content": "time"}], max_tokens=2)
    wait_until(lambda: runtime.instances("m")[0]["state"] == "READY", 120.0)
    assert runtime.chat("m", [{"role": "user", "content": "fine"}], max_tokens=2)["choices"]


def changed_tokenizer(**changes: Any) -> dict[str, bytes]:
    files = tiny.classifier()
    found = json.loads(files["tokenizer.json"])
    for key, value in changes.items():
        found[key] = found[key] | value if isinstance(found[key], dict) else value
    return files | {"tokenizer.json": json.dumps(found).encode()}


def test_a_tokenizer_that_grows_its_text_is_ended(runtime: moonpool.Runtime, hub: Hub) -> None:
    grow = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 1000}
    files = changed_tokenizer(normalizer={"type": "Sequence", "normalizers": [grow] * 4})
    load(runtime, hub, files, MOONPOOL_MEMORY_LIMIT_BYTES="3G")
    with pytest.raises(moonpool.MoonpoolError):
        runtime.infer("m", {"TEXT": texts(b"x")}, timeout_s=300.0)
    wait_until(lambda: runtime.instances("m")[0]["state"] == "READY", 120.0)
    assert runtime.infer("m", {"TEXT": texts(b"a cat")})["SCORE"].shape == (1, 3)


def test_a_tokenizer_that_is_none_is_refused(runtime: moonpool.Runtime, hub: Hub) -> None:
    merges = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"], ["ab", "ab"], ["abab", "none"]]}
    plain = tiny.classifier()
    for wrong in (
        changed_tokenizer(model=merges)["tokenizer.json"],
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        plain["tokenizer.json"][:-10],
        changed_tokenizer(model={"vocab": {"a": -1}})["tokenizer.json"],
    ):
        with pytest.raises(LoadFailed):
            load(runtime, hub, plain | {"tokenizer.json": wrong})


def test_a_tokenizer_that_panics_fails_its_request_alone(runtime: moonpool.Runtime, hub: Hub) -> None:
    files = tiny.classifier()
    found = json.loads(files["tokenizer.json"])
    found["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    load(runtime, hub, files | {"tokenizer.json": json.dumps(found).encode()})
    with pytest.raises(moonpool.MoonpoolError):
        runtime.infer("m", {"TEXT": texts(b"a" * 40 + b"!")})
    assert runtime.infer("m", {"TEXT": texts(b"a cat")})["SCORE"].shape == (1, 3)
