"""`moonpool sandbox`: shows which layers of the sandbox this machine offers."""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import BEST_EFFORT, STRICT, Policy
from moonpool.runtime.cli.shared import logged_to, table
from moonpool.runtime.isolation import users
from moonpool.runtime.isolation.cgroups import GROUPS
from moonpool.runtime.isolation.gpu_access import access_to
from moonpool.runtime.isolation.inspection import REQUIRED, differences
from moonpool.runtime.model.gpus import usable_gpus
from moonpool.runtime.process.child import exit_in_words
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.runtime import Runtime

_TRIAL = str(Path(__file__).resolve().parents[2] / "stub" / "sandbox" / "trial.py")
_PATIENCE_S = 20.0
_MOST_BYTES = 1 << 16
# Limits that are enough for Python, and that a process can soon exceed.
_TIGHT = {"memory_bytes": 1 << 30, "open_files": 64}
# The layers, in the order in which a stub puts them on.
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
FOLDERS = "granted_folders"
_MODEL = textwrap.dedent("""\
    class TritonPythonModel:
        def execute(self, requests):
            return [None for _ in requests]
""")


@dataclass(frozen=True, slots=True)
class Offer:
    """One layer: `detail` describes it, or `why` has the reason why it is missing, and what to do."""

    layer: str
    is_offered: bool
    is_required: bool
    detail: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Strict:
    """The layers that a model at `strict` gets here. If it does not load, `why` has the reason."""

    works: bool
    layers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, by CUDA's number: the devices that a contained instance gets, or why it cannot use the GPU."""

    number: int
    devices: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Offers:
    """Everything that this machine offers to this user."""

    kernel: str
    machine: str
    user: int
    layers: tuple[Offer, ...]
    strict: Strict
    # The mounts by which all instances of a model can write to a granted folder.
    folders: Offer
    gpus: tuple[Gpu, ...]


def find_offers() -> Offers:
    """Try everything, in about a second. It starts and ends processes, and changes nothing for good."""
    system = os.uname()
    return Offers(
        kernel=f"{system.sysname} {system.release}",
        machine=system.machine,
        user=os.geteuid(),
        layers=tuple(try_layer(layer) for layer in LAYERS),
        strict=try_strict(),
        folders=try_folders(),
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
    """Let a process put on this one layer, and look at it from inside and outside."""
    if layer == "cgroup":  # the runtime makes it, not the stub
        return _try_group()
    user = users.take()
    policy = Policy(level=BEST_EFFORT, user=user, limits=_TIGHT)
    try:
        refusal, detail = _tried(layer, policy)
    finally:
        users.give_back(user)
    return Offer(layer, not refusal, layer in REQUIRED, detail, refusal)


def try_folders() -> Offer:
    """Let a process write, like an instance, to a folder of this user that is closed to all others."""
    user = users.take()
    try:
        with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
            policy = Policy(level=BEST_EFFORT, user=user, granted=[(os.path.realpath(folder), True)])
            refusal, detail = _tried(FOLDERS, policy)
            owners = {os.stat(file.path).st_uid for file in os.scandir(folder)}
    finally:
        users.give_back(user)
    if not refusal and owners - {os.geteuid()}:
        refusal = f"it is on, but what was written belongs to users {sorted(owners)}"
    return Offer(FOLDERS, not refusal, is_required=False, detail=detail, why=refusal)


def _try_group() -> Offer:
    group = GROUPS.make(_TIGHT, 50)
    if group is None:
        why = f"{GROUPS.refusal or 'the kernel refused it'}; docs/LIMITS.md has what to do"
        return Offer("cgroup", is_offered=False, is_required=False, why=why)
    group.remove()
    return Offer("cgroup", is_offered=True, is_required=False, detail=group.controls)


def _tried(layer: str, policy: Policy) -> tuple[str, str]:
    """Return the reason why the layer is not on, and its detail if it is."""
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
            return "the process that tried it did not end", ""
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
    """Read the result of the process; empty if it ended without one. Raises TimeoutError."""
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
    """Load a model at `strict`, and return its layers, or the reason why it did not load."""
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        file = Path(folder, "model.py")
        file.write_text(_MODEL, encoding="ascii")
        # An instance may be another user, and see the machine's folders as they are.
        os.chmod(folder, 0o755)
        file.chmod(0o644)
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


HELP = "show which layers of the sandbox this machine offers"
DESCRIPTION = """\
Try each layer of the sandbox in a process of its own: put it on, do what it must prevent, and look at it from outside.
Each layer gets one line. If it is missing, the line says what to change. The last lines show the level `strict` on this
machine, as a real model got it.

The result depends on the kernel, the user and the container. Run this as the user, and in the place, of your models.
Exits with 1 if `strict` does not work. docs/SANDBOX.md explains the layers.
"""
EXAMPLES = """\
examples:
  moonpool sandbox
  moonpool sandbox --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(options: argparse.Namespace) -> int:
    # What a model's stub would log is in what is printed.
    with logged_to(logging.NullHandler(), logging.CRITICAL):
        offers = find_offers()
    if options.json:
        print(json.dumps(asdict(offers), indent=2))
    else:
        terminal = Terminal(sys.stdout)
        for text, style in _lines(offers):
            terminal.line(terminal.paint(harmless(text), style) if style else harmless(text))
    return 0 if offers.strict.works else 1


def _lines(offers: Offers) -> Iterator[tuple[str, str]]:
    yield f"{offers.kernel} on {offers.machine}, user {offers.user}", "bold"
    rows = [[each.layer, "yes" if each.is_offered else "no", _about(each)] for each in offers.layers]
    for line, offer in zip(table(rows, align="<<<"), offers.layers, strict=True):
        yield line, "" if offer.is_offered else "red" if offer.is_required else "yellow"
    yield from _about_strict(offers)
    folders = offers.folders
    if folders.is_offered:
        yield f"granted folders can be written to: {folders.detail}", ""
    else:
        yield f"granted folders cannot be written to as their owners: {folders.why}", "yellow"
    for gpu in offers.gpus:
        if gpu.why:
            yield f"GPU {gpu.number} cannot be given to a contained model: {gpu.why}", "yellow"
        else:
            nodes = ", ".join(gpu.devices)
            yield f"GPU {gpu.number} is given to contained models that name it, by {nodes}", ""


def _about_strict(offers: Offers) -> Iterator[tuple[str, str]]:
    strict = offers.strict
    if not strict.works:
        yield f"strict does not work here: {strict.why}", "red"
        return
    yield f"strict works here, with {', '.join(strict.layers)}", "green"
    said = {sentence.partition(":")[0] for sentence in strict.left_out}
    missing = [each for each in offers.layers if not each.is_offered and each.layer not in said]
    for sentence in (*strict.left_out, *(f"{each.layer}: {each.why}" for each in missing)):
        yield f"without {sentence}", "yellow"


def _about(offer: Offer) -> str:
    if offer.is_offered:
        return offer.detail
    return f"{offer.why} ({'strict needs it' if offer.is_required else 'strict does without'})"
