"""Models of the Hub on their way here: what is copied, what is refused, and what a Hub that lies leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from tests.hub.stand_in import Hub, blob_hash, running

from moonpool.runtime.process.files import RepositoryError
from moonpool.runtime.repository import hub_model, hub_store
from moonpool.runtime.repository.cloud_copies import WATCHERS
from moonpool.runtime.repository.hub_store import HubStore
from moonpool.runtime.repository.repository import HubRepository, ModelDirectory, ModelRepositories, repository_at

WEIGHTS = b"weights" * 1000
FILES = {
    "config.json": json.dumps(
        {"architectures": ["TinyForSequenceClassification"], "id2label": {0: "a", 1: "b"}}
    ).encode(),
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "README.md": b"hello",
}
# Names that are in no allow-list, and what they are.
NEVER = (
    "modeling_evil.py", "evil.so", "pytorch_model.bin", "model.pkl", "weights.pt", "flax.msgpack", "tf.h5", "m.joblib",
    "m.ckpt", "m.gguf", "onnx/model.onnx", "kernel/__init__.py", "model.fp16.safetensors", "config.pbtxt",
    "adapter_config.json",
)  # fmt: skip


def find(address: str, said: dict[str, str] | None = None) -> ModelDirectory:
    return ModelRepositories([]).find_at(address, said)


def names(found: ModelDirectory) -> list[str]:
    return sorted(str(path.relative_to(found.path)) for path in found.path.rglob("*") if path.is_file())


def left(tmp_path: Path) -> list[str]:
    """Return the names of the files that the cache has, without lists and locks."""
    root = tmp_path / "cache" / "moonpool" / "repositories"
    return sorted(path.name for path in root.rglob("*") if path.is_file() and path.suffix not in (".lock", ".making"))


@pytest.mark.promise(
    "Models of the Hub",
    "Files are copied by an allow-list of names: no code, no pickle and no configuration of moonpool's is among them.",
)
def test_files_are_copied_by_an_allow_list(hub: Hub) -> None:
    commit = hub.put("o/m", FILES | dict.fromkeys(NEVER, b"evil"))
    found = find("hf://o/m")
    assert names(found) == ["1/config.json", "1/model.safetensors", "1/tokenizer.json", "config.pbtxt"]
    assert (found.path / "1" / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(set(hub.fetched)) == ["config.json", "model.safetensors", "tokenizer.json"]

    config = found.config(partial=True)
    assert (config.backend, config.raw["runtime"]) == ("transformers", "text_classification.py")
    assert config.parameters["commit"] == commit


STEERING = ("a\x1b[2J.json", "a\nwarning: m: fine.json", "a\r.json", "a\u202e.json", "a\x07.safetensors", "a\x1b[2J.py")


def test_names_that_steer_a_terminal_are_neither_copied_nor_shown(
    hub: Hub, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    files = FILES | dict.fromkeys(STEERING, b"{}")
    commit = hub.put("o/m", files)
    found = find("hf://o/m", {"MOONPOOL_REMOTE_CODE": commit})
    assert names(found) == ["1/config.json", "1/model.safetensors", "1/tokenizer.json", "config.pbtxt"]
    shown = "".join(capsys.readouterr()) + "".join(caplog.messages)
    assert not {each for each in "\x1b\r\x07\u202e" if each in shown}
    assert not [line for line in shown.splitlines() if line.startswith("warning: m: fine")]

    index = {"weight_map": {"a": "a\x07.safetensors"}}
    hub.put("o/m", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(RepositoryError, match=r"names 'a\\x07\.safetensors', which is not a file with weights"):
        find("hf://o/m")


def test_a_commit_is_copied_once_and_its_contents_are_shared(hub: Hub) -> None:
    hub.put("o/m", FILES)
    first = find("hf://o/m")
    asked = len(hub.asked)
    again = find("hf://o/m")
    assert again.path == first.path
    # The revision and the list.
    assert len(hub.asked) - asked == 2
    hub.put("o/m", FILES | {"tokenizer.json": b"[]"})
    hub.asked.clear()
    other = find("hf://o/m")
    assert other.path != first.path
    assert hub.fetched == ["tokenizer.json"]
    inodes = {(each.path / "1" / "model.safetensors").stat().st_ino for each in (first, other)}
    assert len(inodes) == 1


@pytest.mark.promise(
    "Models of the Hub",
    "A revision is resolved to a commit when the repository is opened, and a poll does not follow it.",
)
def test_a_branch_is_not_followed(hub: Hub) -> None:
    first = hub.put("o/m", FILES)
    repository = repository_at("hf://o/m")
    assert isinstance(repository, HubRepository)
    hub.put("o/m", FILES | {"tokenizer.json": b"[]"})
    assert repository.find("m").config(partial=True).parameters["commit"] == first
    assert repository.models() == ["m"]


def test_a_folder_of_models_stays_one(hub: Hub) -> None:
    hub.put("o/models", {"config.json": b"{}", "one/config.pbtxt": b"", "one/1/model.py": b""})
    assert not HubRepository("hf://o/models").is_model


@pytest.mark.parametrize(
    ("architecture", "labels", "task"),
    [
        ("BertForSequenceClassification", {0: "a", 1: "b"}, "text-classification"),
        ("BertForSequenceClassification", {0: "only"}, "rerank"),
        ("BertForSequenceClassification", {0: "ENTAILMENT", 1: "no"}, "zero-shot-classification"),
        ("BertForTokenClassification", None, "token-classification"),
        ("LlamaForCausalLM", None, "text-generation"),
        ("GPT2LMHeadModel", None, "text-generation"),
        ("ViTForImageClassification", None, "image-classification"),
        ("WhisperForConditionalGeneration", None, "automatic-speech-recognition"),
        ("Wav2Vec2ForCTC", None, "automatic-speech-recognition"),
        ("BertModel", None, "embeddings"),
    ],
)
def test_the_task_follows_from_the_configuration(hub: Hub, architecture: str, labels: Any, task: str) -> None:
    hub.put("o/m", FILES | {"config.json": json.dumps({"architectures": [architecture], "id2label": labels}).encode()})
    assert find("hf://o/m").config(partial=True).parameters["task"] == task


WRONG: list[tuple[dict[str, bytes | None], str]] = [
    ({"config.json": b"[]"}, "config.json holds no object"),
    ({"config.json": b"{" * 5}, "config.json is not JSON"),
    ({"config.json": b"[" * 100_000}, "config.json is not JSON"),
    ({"config.json": b'{"a": "' + b"a" * (9 << 20) + b'"}'}, "config.json has 9,437,193 bytes, and 8,388,608 is the most"),
    ({"config.json": b'{"architectures": ["Evil"]}'}, "names the class 'Evil', which fits no task"),
    ({"config.json": b"{}"}, "names no class"),
    ({"model.safetensors": None}, "it has neither model.safetensors nor model.safetensors.index.json"),
    ({"model.safetensors": None, "pytorch_model.bin": b"p"}, "only pickles, which are programs: 'pytorch_model.bin'"),
    ({"model.safetensors.index.json": b'{"weight_map": {"a": "../outside.safetensors"}}'}, "names '../outside.safetensors'"),
    ({"model.safetensors.index.json": b'{"weight_map": {"a": "pytorch_model.bin"}}', "pytorch_model.bin": b"p"}, "names 'pyt"),
    ({"model.safetensors.index.json": b'{"weight_map": {}}'}, "names no files"),
    ({"modules.json": b'[{"type": "evil.Evil", "path": ""}]', "evil.py": b""}, "names the class 'evil.Evil'"),
    ({"modules.json": b'[{"type": [], "path": ""}]'}, "names the class '[]'"),
    ({"modules.json": b'[{"type": "sentence_transformers.models.Pooling", "path": "../x"}]'}, "names the folder '../x'"),
]  # fmt: skip


# Short values take thirty times as much memory as their text, and the server waits while they are made.
MANY = b"[" + b"{}," * 500_000 + b"{}]"
WRONG += [
    ({"config.json": b'{"a": ' + MANY + b"}"}, "config.json is not JSON: it has more than 500,000 values"),
    (
        {"model.safetensors.index.json": b'{"a": ' + MANY + b"}"},
        "index.json is not JSON: it has more than 500,000 values",
    ),
]


@pytest.mark.parametrize(("changes", "error"), WRONG, ids=[error[:40] for _, error in WRONG])
def test_a_repository_that_is_wrong_is_refused_before_it_is_copied(
    hub: Hub, changes: dict[str, bytes | None], error: str, tmp_path: Path
) -> None:
    files = FILES | changes
    hub.put("o/m", {path: content for path, content in files.items() if content is not None})
    with pytest.raises(RepositoryError) as raised:
        find("hf://o/m")
    assert error in str(raised.value)
    assert str(raised.value).startswith("hf://o/m")
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", ["../x.json", "/x.json", "a//b.json", "x" * 300 + ".json", "a/../b.json", "a\0.json"])
def test_a_name_that_no_file_can_have_is_refused(hub: Hub, name: str, tmp_path: Path) -> None:
    hub.put("o/m", FILES)
    hub.more = [{"type": "file", "oid": "0" * 40, "size": 2, "path": name}]
    with pytest.raises(RepositoryError, match="which no file can be named"):
        find("hf://o/m")
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ([{"type": "file", "oid": "0" * 40, "size": 2, "path": "config.json"}], "lists 'config.json' twice"),
        ([{"type": "file", "oid": "../../x", "size": 2, "path": "x.json"}], "says no hash of 'x.json'"),
        ([{"type": "file", "oid": "0" * 40, "size": -1, "path": "x.json"}], "does not say the size"),
        ([{"type": "file", "oid": "0" * 40, "size": "2", "path": "x.json"}], "does not say the size"),
        ([{"type": "file", "size": 2, "path": 7}], "without a path"),
        ([[]], "without a path"),
        (
            [{"type": "file", "oid": "0" * 40, "size": 2, "path": "x", "lfs": {"oid": "0" * 64, "size": 3}}],
            "says two sizes of 'x'",
        ),
        ([{"type": "file", "oid": "0" * 40, "size": 1 << 41, "path": "x.json"}], "more than 1024 GiB"),
    ],
)
def test_a_list_that_is_wrong_is_refused(hub: Hub, more: list[Any], error: str, tmp_path: Path) -> None:
    hub.put("o/m", FILES)
    hub.more = more
    with pytest.raises(RepositoryError, match=error):
        find("hf://o/m")
    assert left(tmp_path) == []


def test_a_small_file_takes_no_place_of_a_list(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository may choose a content, and with it the hash that names it in the cache."""
    hub.put("o/m", FILES)
    find("hf://o/m")
    chosen = repr((hub.url, "o/m", "main")).encode()
    hub.put("evil/m", FILES | {"config.json": chosen})
    hub.listed = lambda entry: entry | {"oid": hashlib.sha256(chosen).hexdigest()}
    with pytest.raises(RepositoryError, match="is not JSON"):
        find("hf://evil/m")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert names(find("hf://o/m"))


def test_a_large_file_in_json_is_refused_before_it_is_copied(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_model, "_MOST_JSON_BYTES", 1000)
    hub.put("o/m", FILES | {"tokenizer.json": b" " * 1001})
    with pytest.raises(RepositoryError, match=r"tokenizer\.json has 1,001 bytes, and 1,000 is the most"):
        find("hf://o/m")
    assert "tokenizer.json" not in hub.fetched


def test_a_list_without_an_end_is_given_up(hub: Hub, tmp_path: Path) -> None:
    hub.put("o/m", FILES)
    following = {"Link": f'<{hub.url}/api/models/o/m/tree/x?cursor=1>; rel="next"'}

    def endless(request: Any, path: str) -> bool:
        if "/tree/" in path:
            folder = b'{"type":"directory","path":"x"}'
            request.answer(200, b"[" + (folder + b",") * 60_000 + folder + b"]", following)
        return "/tree/" in path

    hub.instead = endless
    with pytest.raises(RepositoryError, match="lists more than 100,000 files"):
        find("hf://o/m")
    assert sum("/tree/" in path for path in hub.asked) == 4
    assert left(tmp_path) == []


@pytest.mark.promise("Models of the Hub", "An answer of the Hub takes no more than ten times the memory of its text.")
@pytest.mark.parametrize(
    "page",
    [
        b"[" + b"{}," * 5_000_000 + b"{}]",
        b"[" + b'"ab",' * 3_000_000 + b"0]",
        b'[{"a": [' + b"[]," * 5_000_000 + b"[]]}]",
    ],
    ids=["objects", "texts", "arrays"],
)
def test_a_page_takes_little_more_memory_than_its_text(hub: Hub, page: bytes) -> None:
    hub.put("o/m", FILES)

    def answer(request: Any, path: str) -> bool:
        if "/tree/" in path:
            request.answer(200, page)
        return "/tree/" in path

    hub.instead = answer
    tracemalloc.start()
    try:
        with pytest.raises(RepositoryError, match="more than 200,000 arrays and objects, or 1,000,000 values"):
            find("hf://o/m")
        assert tracemalloc.get_traced_memory()[1] < 10 * len(page)
    finally:
        tracemalloc.stop()


@pytest.mark.promise(
    "Models of the Hub", "A file with another content than the Hub's list says is an error, and is not kept."
)
@pytest.mark.parametrize("path", ["tokenizer.json", "model.safetensors", "config.json"])
def test_another_content_than_listed_is_refused(hub: Hub, path: str, tmp_path: Path) -> None:
    hub.put("o/m", FILES)
    other = FILES[path][::-1]

    def lie(handler: Any, asked: str) -> bool:
        if not asked.endswith(path):
            return False
        handler.answer(200, other)
        return True

    hub.instead = lie
    with pytest.raises(RepositoryError, match=f"content of (1/)?{path} has the"):
        find("hf://o/m")
    assert [name for name in left(tmp_path) if name == hashlib.sha256(other).hexdigest()] == []
    hub.instead = lambda _, __: False
    assert (find("hf://o/m").path / "1" / path).read_bytes() == FILES[path]


def test_more_bytes_than_listed_are_not_written(hub: Hub, tmp_path: Path) -> None:
    hub.put("o/m", FILES)
    ended = threading.Event()

    def lie(handler: BaseHTTPRequestHandler, asked: str) -> bool:
        if not asked.endswith("model.safetensors"):
            return False
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        try:
            while not ended.is_set():
                handler.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        except OSError:
            pass
        return True

    hub.instead = lie
    try:
        with pytest.raises(RepositoryError, match="the Hub sends more than the 7,000 bytes that it lists"):
            find("hf://o/m")
    finally:
        ended.set()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 100_000


def test_a_hub_that_stalls_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    get = HubStore._get
    hub.put("o/m", FILES)
    ended = threading.Event()

    def hurried(store: HubStore, url: str, *more: Any) -> Any:
        # On a busy machine, other answers may take longer.
        monkeypatch.setattr(hub_store, "READ_S", 0.2 if url.endswith("model.safetensors") else 60.0)
        return get(store, url, *more)

    def stall(_: object, asked: str) -> bool:
        return asked.endswith("model.safetensors") and ended.wait(170)

    monkeypatch.setattr(HubStore, "_get", hurried)
    hub.instead = stall
    try:
        with pytest.raises(RepositoryError, match=r"model.safetensors cannot be read: ReadTimeout"):
            find("hf://o/m")
    finally:
        ended.set()


def test_a_hub_that_drips_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_store, "_LEAST_S", 0.3)
    hub.put("o/m", FILES)
    ended = threading.Event()

    def drip(handler: BaseHTTPRequestHandler, asked: str) -> bool:
        if not asked.endswith("model.safetensors"):
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", "7000")
        handler.end_headers()
        try:
            while not ended.wait(0.02):
                handler.wfile.write(b"x")
        except OSError:
            pass
        return True

    hub.instead = drip
    try:
        with pytest.raises(RepositoryError, match=r"bytes came in 0\.3 s"):
            find("hf://o/m")
    finally:
        ended.set()


@pytest.mark.parametrize("status", [429, 503, 500])
def test_a_hub_that_refuses_for_ever_is_asked_three_times(hub: Hub, status: int) -> None:
    hub.put("o/m", FILES)

    def refuse(handler: Any, _: str) -> bool:
        handler.answer(status, b"")
        return True

    hub.instead = refuse
    with pytest.raises(RepositoryError, match=f"HTTP status {status}"):
        find("hf://o/m")
    assert len(hub.asked) == 3


@pytest.mark.usefixtures("hub")
def test_a_model_that_is_not_there_is_told() -> None:
    with pytest.raises(RepositoryError, match=r"RepoNotFound.*; a private or gated model needs HF_TOKEN") as raised:
        find("hf://o/none")
    assert raised.value.code == "NOT_FOUND"


@pytest.mark.promise("Models of the Hub", "A copy that breaks off goes on where it ended, also in the next process.")
def test_a_copy_goes_on_where_it_broke_off(hub: Hub) -> None:
    hub.put("o/m", FILES)
    ranges: list[str] = []
    broken = [True]

    def break_off(handler: Any, asked: str) -> bool:
        if not asked.endswith("model.safetensors"):
            return False
        ranges.append(handler.headers.get("Range", ""))
        if broken[0]:
            handler.send_response(200)
            handler.send_header("Content-Length", "7000")
            handler.end_headers()
            handler.wfile.write(WEIGHTS[:3000])
            handler.close_connection = True
            # All later questions find nothing.
            broken[0] = False
            return True
        if len(ranges) < 4:
            handler.answer(503, b"")
            return True
        return False

    hub.instead = break_off
    with pytest.raises(RepositoryError, match="503"):
        find("hf://o/m")
    ranges.clear()
    ranges += [""] * 4
    found = find("hf://o/m")
    assert ranges[-1] == "bytes=3000-"
    assert (found.path / "1" / "model.safetensors").read_bytes() == WEIGHTS


def partial_file(tmp_path: Path) -> Path:
    """Return the place of the beginning of the weights, whose folder is there."""
    folder = tmp_path / "cache" / "moonpool" / "repositories" / "partial"
    folder.mkdir(parents=True, mode=0o700)
    return folder / hashlib.sha256(WEIGHTS).hexdigest()


@pytest.mark.promise(
    "Models of the Hub",
    "A copy that goes on from other bytes than the file begins with is made anew, as its hash shows.",
)
@pytest.mark.parametrize("begun", [b"x" * 3000, b"x" * 7000, b"x" * 9000, b""])
def test_a_copy_that_was_begun_with_other_bytes_is_made_anew(hub: Hub, tmp_path: Path, begun: bytes) -> None:
    hub.put("o/m", FILES)
    partial = partial_file(tmp_path)
    partial.write_bytes(begun)
    found = find("hf://o/m")
    assert (found.path / "1" / "model.safetensors").read_bytes() == WEIGHTS
    assert not partial.exists()


def test_a_rest_of_other_bytes_is_refused(hub: Hub, tmp_path: Path) -> None:
    """A Hub that says the truth at first, and lies when a copy goes on, keeps nobody's copy from being made later."""
    hub.put("o/m", FILES)
    partial = partial_file(tmp_path)
    partial.write_bytes(WEIGHTS[:3000])

    def lie(handler: Any, asked: str) -> bool:
        if asked.endswith("model.safetensors"):
            handler.answer(
                206 if "Range" in handler.headers else 200, b"x" * (4000 if "Range" in handler.headers else 7000)
            )
        return asked.endswith("model.safetensors")

    hub.instead = lie
    with pytest.raises(RepositoryError, match=r"content of 1/model\.safetensors has the"):
        find("hf://o/m")
    assert not partial.exists()
    hub.instead = lambda _, __: False
    assert (find("hf://o/m").path / "1" / "model.safetensors").read_bytes() == WEIGHTS


def test_a_link_in_place_of_a_partial_copy_is_not_written_through(hub: Hub, tmp_path: Path) -> None:
    hub.put("o/m", FILES)
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    partial_file(tmp_path).symlink_to(other)
    with pytest.raises(RepositoryError, match="cannot be copied"):
        find("hf://o/m")
    assert other.read_bytes() == b"mine"


@pytest.mark.parametrize("place", ["moonpool/repositories/partial", "moonpool/repositories/files", "moonpool/hub"])
def test_a_cache_that_others_may_write_to_is_not_trusted(
    hub: Hub, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put("o/m", FILES)
    find("hf://o/m")
    (tmp_path / "cache" / place).chmod(0o777)
    hub.put("o/m", FILES | {"tokenizer.json": b"[]"})
    if place.endswith("hub"):
        # Its contents are compared with their hashes. Its lists are read offline.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RepositoryError, match=r"no other user may write to it|neither moonpool's cache"):
        find("hf://o/m")


def test_what_another_user_put_into_the_cache_is_compared_with_its_hash(hub: Hub, tmp_path: Path) -> None:
    hub.put("o/m", FILES)
    lists = tmp_path / "cache" / "moonpool" / "hub"
    lists.mkdir(parents=True)
    evil = b'{"architectures": ["EvilForCausalLM"]}'
    evil += b" " * (len(FILES["config.json"]) - len(evil))
    (lists / blob_hash(FILES["config.json"])).write_bytes(evil)
    with pytest.raises(RepositoryError, match=r"content of config\.json has the hash"):
        find("hf://o/m")


@pytest.mark.promise("Models of the Hub", "Servers that load a model at the same time copy it once.")
def test_two_servers_that_fetch_a_model_at_once_copy_it_once(hub: Hub, tmp_path: Path) -> None:
    hub.put("o/m", FILES)
    asked = threading.Event()

    def wait(_: object, path: str) -> bool:
        # The first one holds the place while the second one comes.
        if path.endswith("model.safetensors"):
            asked.wait(0.5)
        return False

    hub.instead = wait
    code = (
        "import sys; import huggingface_hub.constants as constants; constants.ENDPOINT = sys.argv[1]\n"
        "from moonpool.runtime.repository.repository import ModelRepositories\n"
        "found = ModelRepositories([]).find_at('hf://o/m', None)\n"
        "print(found.path, (found.path / '1' / 'model.safetensors').stat().st_ino, flush=True); sys.stdin.read()"
    )
    places = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
    environment = {**os.environ, **places, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    servers = [
        subprocess.Popen([sys.executable, "-c", code, hub.url], env=environment, stdin=pipe, stdout=pipe, text=True)
        for _ in range(3)
    ]
    try:
        said = {server.stdout.readline() for server in servers if server.stdout}
    finally:
        for server in servers:
            server.communicate(timeout=60)
    assert len(said) == 1
    assert next(iter(said)).startswith(str(tmp_path))
    assert hub.fetched.count("model.safetensors") == 1


def test_the_token_goes_to_the_hub_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.put("o/m", FILES)
    with running() as elsewhere:

        def redirect(handler: Any, asked: str) -> bool:
            if "/resolve/" in asked:
                handler.answer(302, b"", {"Location": f"http://localhost:{elsewhere.url.rpartition(':')[2]}{asked}"})
                return True
            return False

        hub.instead = redirect
        elsewhere.commits, elsewhere.revisions = hub.commits, hub.revisions
        find("hf://o/m")
        assert {each.get("authorization") or each.get("Authorization") for each in hub.headers} == {"Bearer hf_secret"}
        assert elsewhere.fetched
        assert not any("hf_secret" in str(each) for each in elsewhere.headers)


def test_a_next_page_on_another_host_is_refused(hub: Hub) -> None:
    hub.put("o/m", FILES)

    def lead_away(handler: Any, asked: str) -> bool:
        if "/tree/" in asked:
            handler.answer(200, b"[]", {"Link": '<http://127.0.0.2:1/api/x>; rel="next"'})
            return True
        return False

    hub.instead = lead_away
    with pytest.raises(RepositoryError, match="the next page of the list is on another host"):
        find("hf://o/m")


def test_offline_models_come_from_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.put("o/m", FILES)
    online = find("hf://o/m")
    hub.asked.clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert [find(address).path for address in ("hf://o/m", f"hf://o/m@{commit}")] == [online.path] * 2
    with pytest.raises(RepositoryError, match=r"HF_HUB_OFFLINE is set, and neither .* has its revision 'other'"):
        find("hf://o/m@other")
    assert hub.asked == []


@pytest.mark.promise(
    "Models of the Hub", "What huggingface_hub has fetched is taken from its cache, offline too, if its hash is right."
)
def test_offline_models_come_from_the_cache_of_the_library(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = "c" * 40
    known = tmp_path / "hf" / "models--o--m"
    (known / "blobs").mkdir(parents=True)
    (known / "refs").mkdir()
    (known / "refs" / "main").write_text(commit)
    for path, content in FILES.items():
        entry = hub.entry(path, content)
        oid = entry.get("lfs", entry)["oid"]
        (known / "blobs" / oid).write_bytes(content)
        link = known / "snapshots" / commit / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(known / "blobs" / oid)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (link.parent / "tokenizer.json").resolve().write_bytes(b"[]")
    with pytest.raises(RepositoryError, match=r"the content of tokenizer\.json has the hash"):
        find("hf://o/m")
    (link.parent / "tokenizer.json").resolve().write_bytes(b"{}")
    found = find("hf://o/m")
    assert names(found) == ["1/config.json", "1/model.safetensors", "1/tokenizer.json", "config.pbtxt"]
    assert hub.asked == []


def test_grants_are_for_one_commit(hub: Hub) -> None:
    files = FILES | {"modeling_own.py": b"code", "pytorch_model.bin": b"pickle"}
    del files["model.safetensors"]
    first = hub.put("o/m", files)
    granted = {"MOONPOOL_REMOTE_CODE": first, "MOONPOOL_PICKLED_WEIGHTS": first}
    found = find("hf://o/m", granted)
    assert "1/modeling_own.py" in names(found)
    assert "1/pytorch_model.bin" in names(found)
    assert found.config(partial=True).parameters["remote_code"] == "yes"
    hub.put("o/m", files | {"modeling_own.py": b"other"})
    with pytest.raises(RepositoryError, match="only pickles"):
        find("hf://o/m", granted)


@pytest.mark.promise(
    "Models of the Hub",
    "`moonpool check hf://owner/model` tells what a repository is and would like, before it is copied.",
)
def test_a_check_tells_what_a_repository_would_like(hub: Hub, tmp_path: Path) -> None:
    commit = hub.put("o/m", FILES | {"evil.py": b"", "old.pkl": b""})
    told: list[str] = []

    def note(_: object, asked: str) -> bool:
        told.append(asked)
        return False

    hub.instead = note
    # The check ends with the load, which needs an interpreter with transformers.
    command = [sys.executable, "-m", "moonpool", "check", "hf://o/m", "--sandbox", "strict"]
    places = {"HF_ENDPOINT": hub.url, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        command,
        env={**os.environ, **places, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert f"step: m: hf://o/m@{commit}: text-classification, 3 files, 7,088 bytes" in lines, done.stderr
    assert "step: m: model.safetensors, 7,000 bytes" in lines
    assert 'step: m: runtime: "text_classification.py"' in lines
    assert any(line.startswith("warning: m: it has code, 'evil.py'; it is not copied") for line in lines)
    assert any("it has pickles, which are programs: 'old.pkl'; not copied" in line for line in lines)
    assert lines[-1].startswith("error: m: ")
    assert done.returncode == 1


def test_a_copy_tells_how_far_it_is(hub: Hub) -> None:
    told: list[tuple[str, int, int]] = []

    class Display:
        def copying(self, what: str, copied_bytes: int, all_bytes: int) -> None:
            told.append((what, copied_bytes, all_bytes))

    display = Display()
    WATCHERS.add(display)
    hub.put("o/m", FILES)
    size = sum(path.stat().st_size for path in find("hf://o/m").path.rglob("*") if path.is_file())
    assert told[-2:] == [("hf://o/m/m", size, size), ("hf://o/m/m", 0, 0)]
