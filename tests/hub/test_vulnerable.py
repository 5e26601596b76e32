"""Libraries that run code of a repository although nobody allowed it, and what that code gets at each level.

Each attack succeeds at `off`, which shows that it is one. At `strict` it runs where the library has all it needs, and
gets nothing. In moonpool's own backend it does not run at any level, with these versions, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socketserver
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosting import MODELS, tensor
from tests.hub import tiny
from tests.hub.payload import payload
from tests.hub.stand_in import Hub
from tests.waiting import wait_until

import moonpool
from moonpool.errors import LoadFailed, RepositoryError

pytestmark = [
    pytest.mark.skipif(
        find_spec("kernels") is None, reason="the libraries are not installed: bash .ci/run hub-vulnerable"
    ),
    pytest.mark.timeout(900),
]
OPTIONS = {"MOONPOOL_LOAD_TIMEOUT_S": "600"}
KERNEL = "build/torch-universal/kernel/__init__.py"


@pytest.fixture
def runtime(hub: Hub) -> Iterator[moonpool.Runtime]:
    assert hub.url
    with moonpool.Runtime() as made:
        yield made


class Scene:
    """A secret, a place for a mark and a server of another, and the code that tries to get at them."""

    def __init__(self, folder: Path, port: int) -> None:
        self.secret, self.mark = folder / "secret", folder / "mark"
        self.secret.write_text("secret")
        self.tries: dict[str, dict[str, Any]] = {
            "files.read": {"path": str(self.secret)},
            "files.write": {"path": str(self.mark), "text": "here"},
            "network.tcp": {"port": port},
            "processes.spawn": {},
            "processes.signal_to": {"pid": os.getpid()},
        }

    @property
    def code(self) -> bytes:
        return payload(self.tries)


class Greeter(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"hello")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greeter) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.05,))
        thread.start()
        yield Scene(tmp_path, other.server_address[1])
        other.shutdown()
        thread.join()


def with_config(**more: object) -> dict[str, bytes]:
    files = tiny.bert("BertModel")
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | more).encode()}


def attacked(
    runtime: moonpool.Runtime, hub: Hub, folder: Path, way: str, files: Mapping[str, bytes], level: str, **options: str
) -> dict[str, Any]:
    """Load these files with a model that does as other programs do, and return what it says."""
    version = folder / "m" / "1"
    for path, content in files.items():
        file = version / "files" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    shutil.copy(MODELS / "trusting" / "model.py", version)
    parameters = {"way": way, "hub": hub.url}
    config = {
        "input": [tensor("X", "STRING", 1)],
        "output": [tensor("SAID", "STRING", 1)],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }
    runtime.load("m", folder / "m", config=config, sandbox=level, options=OPTIONS | options)
    said: dict[str, Any] = json.loads(runtime.infer("m", {"X": ["?"]})["SAID"][0])
    return said


def check_all_succeeded(said: Mapping[str, Any], scene: Scene) -> None:
    assert said["outcomes"] == dict.fromkeys(scene.tries, "done"), said
    assert scene.mark.read_text() == "here"


def check_nothing_succeeded(said: Mapping[str, Any], scene: Scene) -> None:
    assert said["outcomes"].keys() == scene.tries.keys(), said
    assert "done" not in said["outcomes"].values(), said
    assert not scene.mark.exists()


# CVE-2026-4372


def test_a_kernel_runs_in_a_program_without_a_sandbox(
    runtime: moonpool.Runtime, hub: Hub, scene: Scene, tmp_path: Path
) -> None:
    hub.put("evil/kernel", {KERNEL: scene.code})
    files = with_config(_attn_implementation_internal="evil/kernel")
    check_all_succeeded(attacked(runtime, hub, tmp_path, "transformers", files, "off"), scene)


def test_a_kernel_is_not_fetched_at_strict_and_the_log_says_what_was_tried(
    runtime: moonpool.Runtime, hub: Hub, scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moonpool")
    hub.put("evil/kernel", {KERNEL: scene.code})
    files = with_config(_attn_implementation_internal="evil/kernel")
    said = attacked(runtime, hub, tmp_path, "transformers", files, "strict")
    assert said["outcomes"] is None
    assert "evil/kernel" in said["error"]
    assert not hub.asked
    line = "[m_0] its sandbox did not let it "
    wait_until(
        lambda: any(each.startswith(line) and "MOONPOOL_SANDBOX_PORTS" in each for each in caplog.messages), 60.0
    )


def test_a_kernel_that_can_be_fetched_gets_nothing_at_strict(
    runtime: moonpool.Runtime, hub: Hub, scene: Scene, tmp_path: Path
) -> None:
    hub.put("evil/kernel", {KERNEL: scene.code})
    files = with_config(_attn_implementation_internal="evil/kernel")
    port = hub.url.rpartition(":")[2]
    said = attacked(runtime, hub, tmp_path, "transformers", files, "strict", MOONPOOL_SANDBOX_PORTS=port)
    check_nothing_succeeded(said, scene)


@pytest.mark.parametrize("level", ["strict", "off"])
@pytest.mark.parametrize("name", ["evil/kernel", "./kernel"])
def test_a_kernel_does_not_run_in_the_backend(
    runtime: moonpool.Runtime, hub: Hub, scene: Scene, level: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    hub.put("evil/kernel", {KERNEL: scene.code})
    hub.put("o/m", with_config(_attn_implementation_internal=name) | {f"kernel/{KERNEL}": scene.code})
    # This version of the library may insist.
    with contextlib.suppress(LoadFailed):
        runtime.load("m", "hf://o/m", sandbox=level, options=OPTIONS)
    assert f"_attn_implementation_internal names '{name}', whose code some versions" in caplog.text
    assert not [path for path in hub.asked if "evil" in path]
    assert not scene.mark.exists()


def test_a_cache_that_another_user_filled_is_not_read(
    runtime: moonpool.Runtime, hub: Hub, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below `strict` the folder for temporary files is everybody's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for root in (tmp_path / "hub", tmp_path):
        known = root / "models--evil--kernel"
        file = known / "snapshots" / ("0" * 40) / KERNEL
        file.parent.mkdir(parents=True)
        file.write_bytes(scene.code)
        (known / "refs").mkdir()
        (known / "refs" / "main").write_text("0" * 40)
    hub.put("o/m", with_config(_attn_implementation_internal="evil/kernel"))
    with contextlib.suppress(LoadFailed):
        runtime.load("m", "hf://o/m", sandbox="off", options=OPTIONS)
    assert not scene.mark.exists()
    assert not list(tmp_path.glob("moonpool-hub-*"))


# sentence-transformers, whose folders counted as trusted


def with_modules(code: bytes) -> dict[str, bytes]:
    modules = [{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}]
    return tiny.bert("BertModel") | {"modules.json": json.dumps(modules).encode(), "evil.py": code}


@pytest.mark.parametrize("level", ["strict", "off"])
def test_a_class_in_modules_json(runtime: moonpool.Runtime, hub: Hub, scene: Scene, level: str, tmp_path: Path) -> None:
    said = attacked(runtime, hub, tmp_path, "sentence-transformers", with_modules(scene.code), level)
    (check_all_succeeded if level == "off" else check_nothing_succeeded)(said, scene)


def test_a_class_in_modules_json_is_refused_by_the_backend(runtime: moonpool.Runtime, hub: Hub, scene: Scene) -> None:
    hub.put("o/m", with_modules(scene.code))
    with pytest.raises(RepositoryError, match=r"modules\.json names the class 'evil\.Evil'"):
        runtime.load("m", "hf://o/m", sandbox="off")


# CVE-2026-5843


@pytest.mark.parametrize("level", ["strict", "off"])
def test_a_model_file(runtime: moonpool.Runtime, hub: Hub, scene: Scene, level: str, tmp_path: Path) -> None:
    files = with_config(model_file="evil.py") | {"evil.py": scene.code}
    # The library raises its limit of open files.
    said = attacked(runtime, hub, tmp_path, "mlx-lm", files, level, MOONPOOL_OPEN_FILES="4096")
    (check_all_succeeded if level == "off" else check_nothing_succeeded)(said, scene)


def test_a_model_file_is_not_copied_by_the_backend(
    runtime: moonpool.Runtime, hub: Hub, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    hub.put("o/m", with_config(model_file="evil.py") | {"evil.py": scene.code})
    runtime.load("m", "hf://o/m", sandbox="off", options=OPTIONS)
    assert "model_file names 'evil.py', which other libraries import; it is not copied" in caplog.text
    assert "evil.py" not in hub.fetched
    assert not scene.mark.exists()
