"""Repositories at `s3://`, in a store on this machine, from Python and in a server."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.inside import registry_of
from tests.server.repositories import BAD, CONFIG, ECHO
from tests.server.running import running
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.process.files import RepositoryError
from moonpool.runtime.repository import cloud_store, repository
from moonpool.runtime.repository.folder_cache import FolderCache
from moonpool.runtime.server.repository_control import RepositoryControl

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("moto", "flask", "s3fs"))),
    reason="needs a store on this machine: pip install 'moto[server]' s3fs",
)
IN = {"IN": np.ones((1, 4), np.float32)}
KEYS = {
    "AWS_ACCESS_KEY_ID": "key-of-the-test",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
    "AWS_DEFAULT_REGION": "us-east-1",
}
BUCKET = "bucket-of-the-test"
TELLS = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        told = "\\n".join(f"{name}={value}" for name, value in os.environ.items())
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([told.encode()], object))])
            for _ in requests
        ]
"""
TELLS_CONFIG = """
backend: "python"
output [{ name: "OUT" data_type: TYPE_STRING dims: [1] }]
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] optional: true }]
"""


class Store:
    """A server of S3's protocol on this machine, with one bucket."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        import boto3

        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
        )
        self._client.create_bucket(Bucket=BUCKET)

    @property
    def url(self) -> str:
        return f"s3://127.0.0.1:{self.port}/{BUCKET}/models"

    def put(self, path: str, text: str) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"models/{path}", Body=text.encode())

    def remove(self, *paths: str) -> None:
        for path in paths:
            self._client.delete_object(Bucket=BUCKET, Key=f"models/{path}")

    def write(self, name: str, text: str = ECHO, config: str = CONFIG, version: int = 1) -> None:
        self.put(f"{name}/{version}/model.py", text)
        self.put(f"{name}/config.pbtxt", config)

    def clear(self) -> None:
        found = self._client.list_objects_v2(Bucket=BUCKET)
        for each in found.get("Contents", []):
            self._client.delete_object(Bucket=BUCKET, Key=each["Key"])

    def stop(self) -> None:
        self._client.close()
        self._server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    from fsspec.asyn import get_loop

    get_loop()  # fsspec's thread and its descriptors stay until the program ends
    store = Store()
    yield store
    store.stop()


@pytest.fixture
def store(server: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Return the store with the models `good` and `other`."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(repository, "_KEPT_S", 0.0)
    server.write("good")
    server.write("other")
    yield server
    server.clear()


@pytest.fixture
def runtime(store: Store) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(store.url, models=()) as runtime:
        yield runtime


def remove_unused() -> list[Path]:
    """Remove the copies that nobody uses, as another runtime of this user does. Returns their folders."""
    return FolderCache(Path(os.environ["XDG_CACHE_HOME"], "moonpool", "repositories", "models")).remove_unused()


def states(control: RepositoryControl) -> dict[str, str]:
    return {each["name"]: each.get("state", "") for each in control.index()}


@pytest.mark.promise("Repositories in the cloud", "A runtime and a server take an address where they take a folder.")
def test_a_runtime_loads_all_models_of_an_address(store: Store) -> None:
    store.write("good", version=3)
    with moonpool.Runtime(store.url) as runtime:
        assert runtime.models() == {"good": [3], "other": [1]}
        assert runtime.infer("good", IN)["OUT"].tolist() == [[1.0] * 4]
    with pytest.raises(RepositoryError, match="the runtime was closed"):
        registry_of(runtime).repositories.find("good")


@pytest.mark.promise(
    "Repositories in the cloud",
    "No model sees the variables with the credentials for its runtime's repositories, at any level, unless "
    "MOONPOOL_ENVIRONMENT names them.",
)
@pytest.mark.parametrize("level", ["off", "standard", "strict"])
def test_no_model_sees_the_credentials(store: Store, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret-of-the-test")
    monkeypatch.setenv("PYTHON_HARMLESS", "seen")
    store.write("tells", TELLS, TELLS_CONFIG)
    granted = {"MOONPOOL_ENVIRONMENT": "AWS_ACCESS_KEY_*"}
    with moonpool.Runtime(store.url, models=["tells"], sandbox=level) as runtime:
        told = bytes(runtime.infer("tells", {})["OUT"][0]).decode()
        (found,) = runtime.instances("tells")
        assert b"of-the-test" not in Path(f"/proc/{found['pid']}/environ").read_bytes()
        runtime.load("tells", options=granted)
        named = bytes(runtime.infer("tells", {})["OUT"][0]).decode()
    assert "of-the-test" not in told
    assert "PYTHON_HARMLESS=seen" in told
    assert "key-of-the-test" in named
    assert "secret-of-the-test" not in named


@pytest.mark.promise(
    "Repositories in the cloud",
    "A poll copies what is new or has changed, by ETag, and unloads models that are gone. While the store does not "
    "answer, the models stay.",
)
def test_a_poll_follows_the_store(store: Store, runtime: moonpool.Runtime) -> None:
    control = RepositoryControl(runtime, mode="poll")
    control.poll()
    first = runtime.instances("good")[0]["pid"]
    # The same content again has the same ETag.
    store.write("good")
    control.poll()
    assert runtime.instances("good")[0]["pid"] == first

    store.write("good", ECHO + "\n")
    store.write("third")
    store.remove("other/1/model.py", "other/config.pbtxt")
    control.poll()

    assert runtime.instances("good")[0]["pid"] != first
    assert sorted(runtime.models()) == ["good", "third"]
    wait_until(lambda: states(control)["other"] == "UNAVAILABLE")


def test_models_stay_while_the_store_does_not_answer(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    control = RepositoryControl(runtime, mode="poll")
    control.poll()

    def fail(*_: object, **__: object) -> None:
        raise ConnectionResetError("the network is away")

    monkeypatch.setattr(cloud_store, "_call", fail)
    monkeypatch.setattr(cloud_store, "_PAUSES_S", (0.0, 0.0))
    for _ in range(2):
        control.poll()
    assert sorted(runtime.models()) == ["good", "other"]
    assert runtime.infer("good", IN)["OUT"].tolist() == [[1.0] * 4]
    assert caplog.text.count("its models are unchanged: s3://127.0.0.1") == 1


@pytest.mark.promise("Repositories in the cloud", "One model that cannot be copied does not stop the others.")
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("bad/../../escaped", "has an object 'bucket-of-the-test/models/bad/.."),
        ("bad//1/model.py", "which no file can be named"),
    ],
)
def test_a_model_that_cannot_be_copied_does_not_stop_the_others(
    store: Store, runtime: moonpool.Runtime, tmp_path: Path, path: str, text: str
) -> None:
    store.write("bad")
    store.put(path, "evil")
    control = RepositoryControl(runtime)

    assert not control.load_all()
    assert sorted(runtime.models()) == ["good", "other"]
    with pytest.raises(LoadFailed) as raised:
        control.load("bad")
    assert text in str(raised.value)
    assert "failed to poll from model repository" in str(raised.value)
    assert list(tmp_path.rglob("escaped")) == []


def test_models_are_loaded_and_unloaded_on_demand(store: Store, runtime: moonpool.Runtime) -> None:
    control = RepositoryControl(runtime)
    assert control.index() == [{"name": "good"}, {"name": "other"}]
    control.load("good")
    assert states(control) == {"good": "READY", "other": ""}
    store.write("late")
    control.load("late")
    control.unload("good")
    wait_until(lambda: states(control)["good"] == "UNAVAILABLE")
    with pytest.raises(LoadFailed, match="no model 'none' in the repository s3://127"):
        control.load("none")
    # A configuration of the client, over the files of the store.
    tensor = {"data_type": "TYPE_FP32", "dims": [4]}
    whole = {
        "backend": "python",
        "max_batch_size": 2,
        "input": [{"name": "IN", **tensor}],
        "output": [{"name": "OUT", **tensor}],
    }
    control.load("late", json.dumps(whole))
    assert runtime.config("late").max_batch_size == 2


def test_the_copy_of_a_replaced_model_may_go_when_it_is_unloaded(store: Store, runtime: moonpool.Runtime) -> None:
    runtime.load("good")
    store.write("good", ECHO + "\n")
    runtime.load("good")
    wait_until(lambda: len(remove_unused()) == 1)
    runtime.unload("good")
    assert len(remove_unused()) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [("nothing-here", "there is nothing at s3://"), (f"{BUCKET}/nothing", "there is nothing at s3://")],
)
def test_an_address_with_nothing_is_refused(store: Store, path: str, text: str) -> None:
    with pytest.raises(RepositoryError, match=text):
        moonpool.Runtime(f"s3://127.0.0.1:{store.port}/{path}")


def test_a_store_that_is_not_there_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.port
    monkeypatch.setattr(cloud_store, "_PAUSES_S", (0.0,))
    with pytest.raises(RepositoryError, match=r"s3://127\.0\.0\.1:1/b cannot be read: .*[Cc]onnect"):
        moonpool.Runtime("s3://127.0.0.1:1/b")


@pytest.mark.promise(
    "Repositories in the cloud",
    "`Runtime.load` takes the address of one model where it takes a folder, and copies nothing again while the ETags "
    "stay.",
)
def test_one_model_is_loaded_from_its_address(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_HARMLESS", "seen")
    store.write("tells", TELLS, TELLS_CONFIG)
    with moonpool.Runtime() as runtime:
        runtime.load("mine", f"{store.url}/good")
        runtime.load("tells", f"{store.url}/tells/")
        assert runtime.models() == {"mine": [1], "tells": [1]}
        assert runtime.infer("mine", IN)["OUT"].tolist() == [[1.0] * 4]
        told = bytes(runtime.infer("tells", {})["OUT"][0]).decode()
        assert "of-the-test" not in told
        assert "PYTHON_HARMLESS=seen" in told

        before = runtime.instances("mine")[0]["pid"]
        runtime.load("mine", f"{store.url}/good")
        assert runtime.instances("mine")[0]["pid"] == before
        store.write("good", ECHO + "\n")
        runtime.load("mine", f"{store.url}/good")
        assert runtime.instances("mine")[0]["pid"] != before
        repositories = registry_of(runtime).repositories
    with pytest.raises(RepositoryError, match="the runtime was closed"):
        repositories.find_at(f"{store.url}/good")
    assert len(remove_unused()) == 3


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("{url}/none", "no model 'none' in the repository s3://127"),
        ("s3://me:secret@host", "a model's address ends in its folder"),
        ("hf://owner", "a model's address ends in its folder"),
        ("ftp://host/model", "moonpool reads s3://"),
        ("s3://me:secret@host/models/m", "must be a plain address"),
        ("{url}/..", "model name '..' must be"),
    ],
)
def test_an_address_that_is_no_models_is_refused(store: Store, path: str, what: str) -> None:
    with moonpool.Runtime() as runtime:
        with pytest.raises(RepositoryError) as caught:
            runtime.load("m", path.format(url=store.url))
        assert what in str(caught.value)
        assert "secret" not in str(caught.value)
        assert runtime.models() == {}


def ready(client: Any, name: str) -> bool:
    return bool(client.get(f"/v2/models/{name}/ready")[0] == 200)


def test_a_server_follows_an_address(store: Store, tmp_path: Path) -> None:
    store.write("bad", BAD)
    variables = {**KEYS, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    options = ("--model-control-mode=poll", "--repository-poll-secs=1", "--exit-on-error=false")
    with running(store.url, *options, variables=variables) as served:
        assert ready(served, "good")
        assert not ready(served, "bad")
        assert "secret-of-the-test" not in served.text()
        store.write("bad")
        store.write("new")
        wait_until(lambda: ready(served, "bad") and ready(served, "new"))
        code, index = served.get("/v2/repository/index", "POST")
        assert code == 200
        assert {each["name"]: each["state"] for each in index} == dict.fromkeys(
            ("bad", "good", "new", "other"), "READY"
        )
        served.tell(signal.SIGTERM)
        assert served.wait() == 0
