"""What this kernel offers to the sandbox of a stub, to this user, in this container: tried, not guessed.

Each layer is put on by a process of its own (`stub/sandbox/trial.py`, which uses what stubs use), which tries
what the layer is to prevent; then the process is looked at from outside. What `strict` is here is known from a real
model in a real stub.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import BEST_EFFORT, STRICT, Policy
from moonpool.runtime.gpus import usable_gpus
from moonpool.runtime.limits.cgroups import GROUPS
from moonpool.runtime.process import exit_in_words
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.sandbox import users
from moonpool.runtime.sandbox.gpu_access import access_to
from moonpool.runtime.sandbox.inspection import REQUIRED, differences

_TRIAL = str(Path(__file__).resolve().parents[2] / "stub" / "sandbox" / "trial.py")
_PATIENCE_S = 20.0
_MOST_BYTES = 1 << 16
# What Python does well with, and a process soon goes beyond.
_TIGHT = {"memory_bytes": 1 << 30, "open_files": 64}
# In the order in which a stub puts them on.
LAYERS = (
    "dies_with_runtime",
    "limits",
    "namespaces",
    "own_user",
    "no_capabilities",
    "no_new_privs",
    "not_dumpable",
    "landlock",
    "seccomp",
    "cgroup",
)
_MODEL = textwrap.dedent("""\
    class TritonPythonModel:
        def execute(self, requests):
            return [None for _ in requests]
""")


@dataclass(frozen=True, slots=True)
class Offer:
    """One layer: what there is of it (`detail`), or why there is none and what to do (`why`)."""

    layer: str
    is_offered: bool
    is_required: bool
    detail: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Strict:
    """What a model at `strict` gets here; where it gets nothing, `why` says so."""

    works: bool
    layers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by CUDA's number: what a contained instance on it is given, or why it cannot be on it."""

    number: int
    devices: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Offers:
    """All of it, on this machine, for this user."""

    kernel: str
    machine: str
    user: int
    layers: tuple[Offer, ...]
    strict: Strict
    gpus: tuple[Gpu, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def find_offers() -> Offers:
    """Try everything; takes about a second. Starts and ends processes, changes nothing that lasts."""
    system = os.uname()
    return Offers(
        kernel=f"{system.sysname} {system.release}",
        machine=system.machine,
        user=os.geteuid(),
        layers=tuple(try_layer(layer) for layer in LAYERS),
        strict=try_strict(),
        gpus=tuple(_gpu(number) for number in usable_gpus()[0]),
    )


def _gpu(number: int) -> Gpu:
    try:
        devices = access_to([number]).devices
    except MoonpoolError as error:
        return Gpu(number, why=str(error))
    missing = [device for device in devices if not os.path.exists(device)]
    return Gpu(number, devices, f"there is no {', no '.join(missing)}" if missing else "")


def try_layer(layer: str) -> Offer:
    """Have a process put this one layer on, and look at it from both sides."""
    if layer == "cgroup":  # which the runtime makes
        return _try_group()
    user = users.take()
    policy = Policy(level=BEST_EFFORT, user=user, limits=_TIGHT)
    try:
        refusal, detail = _tried(layer, policy)
    finally:
        users.give_back(user)
    return Offer(layer, not refusal, layer in REQUIRED, detail, refusal)


def _try_group() -> Offer:
    group = GROUPS.make(_TIGHT, 50)
    if group is None:
        why = f"{GROUPS.refusal or 'the kernel refused it'}; docs/LIMITS.md has what to do"
        return Offer("cgroup", is_offered=False, is_required=False, why=why)
    group.remove()
    return Offer("cgroup", is_offered=True, is_required=False, detail=group.controls)


def _tried(layer: str, policy: Policy) -> tuple[str, str]:
    """Why the layer is not on, or what there is of it."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", _TRIAL, layer, policy.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            result = _answer(process)
            is_on = result.get("on", "")
            wrong = differences(process.pid, policy, [is_on]) if is_on else []
            _, errors = process.communicate(timeout=_PATIENCE_S)
        except (TimeoutError, subprocess.TimeoutExpired):
            process.kill()
            return "the process that tried it did not come to an end", ""
        except BaseException:
            process.kill()
            raise
    if not result:
        said = errors.decode(errors="replace").strip().splitlines()
        words = f"the process that tried it {exit_in_words(process.returncode)}"
        return f"{words}: {said[-1]}" if said else words, ""
    if wrong:
        return f"it was put on, but seen from outside {'; '.join(wrong)}", ""
    return result["why"], result["detail"]


def _answer(process: subprocess.Popen[bytes]) -> dict[str, str]:
    """What the process found; nothing where it ended without a word. Raises TimeoutError."""
    if process.stdout is None:
        raise ValueError("the process has no pipe to tell what it found")
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(_PATIENCE_S * 1000):
        raise TimeoutError
    # Written at once, and small enough to be read at once.
    line = os.read(process.stdout.fileno(), _MOST_BYTES)
    found: dict[str, str] = json.loads(line) if line else {}
    return found


def try_strict() -> Strict:
    """Load a model at `strict`, and say what it came to have, or why it did not come to be."""
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        file = Path(folder, "model.py")
        file.write_text(_MODEL, encoding="ascii")
        tensor = {"data_type": "TYPE_FP32", "dims": [1]}
        config = {
            "input": [{"name": "X", **tensor}],
            "output": [{"name": "Y", **tensor}],
            "parameters": {"MOONPOOL_SANDBOX": {"string_value": STRICT}},
        }
        with Runtime() as runtime:
            try:
                runtime.load("tried", file, config=config)
            except MoonpoolError as error:
                return Strict(False, why=str(error))
            sandbox = runtime.instances("tried")[0]["sandbox"]
    return Strict(True, tuple(sandbox["layers"]), tuple(sandbox["left_out"]))
