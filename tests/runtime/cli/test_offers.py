"""The command tells the truth about a kernel: with all layers, and with one that is missing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests import as_nobody, lesser_kernel
from tests.runtime.cli.shell import PATIENCE_S, environment

from moonpool.runtime.cli.sandbox import LAYERS

ASK = [sys.executable, "-m", "moonpool", "sandbox"]
# The user who runs the tests asks, and one without rights.
USERS = ("self", "nobody")


class Told:
    """The command's exit code and output."""

    def __init__(self, program: list[str]) -> None:
        ended = subprocess.run(
            program, capture_output=True, text=True, check=False, env=environment(), timeout=PATIENCE_S
        )
        if "mounts" in ended.stderr:
            pytest.skip(ended.stderr)
        assert ended.stderr == ""
        found = json.loads(ended.stdout)
        self.code = ended.returncode
        self.layers: dict[str, dict[str, Any]] = {each["layer"]: each for each in found["layers"]}
        self.strict: dict[str, Any] = found["strict"]
        self.user: int = found["user"]


def told(user: str, **refusals: int) -> Told:
    """Run the command as that user, on a kernel that refuses these calls."""
    program = [*ASK, "--json"]
    if refusals:
        program = lesser_kernel.command(program, **refusals)
    return Told(as_nobody.command(program) if user == "nobody" else program)


@pytest.fixture(scope="module", params=USERS)
def here(request: pytest.FixtureRequest) -> Told:
    return told(request.param)


@pytest.mark.promise(
    "Seeing sandboxes",
    "For each layer, `moonpool sandbox` says what this kernel, user and container offer, "
    "because a process has tried to put it on. For a missing layer it says why, and what to do.",
)
def test_every_layer_is_there_in_the_order_in_which_it_is_put_on(here: Told) -> None:
    assert list(here.layers) == list(LAYERS)
    for layer in here.layers.values():
        assert layer["detail"] if layer["is_offered"] else layer["why"]


@pytest.mark.promise(
    "Seeing sandboxes",
    "The command reports for `strict` the layers that a model really got. It exits with 1 if no "
    "model can be loaded at `strict`.",
)
def test_the_report_on_strict_agrees_with_the_layers(here: Told) -> None:
    required = [layer for layer in here.layers.values() if layer["is_required"]]
    assert here.strict["works"] == all(layer["is_offered"] for layer in required)
    assert here.code == (0 if here.strict["works"] else 1)
    if here.strict["works"]:
        # Shared memory of its own comes with namespaces. The command does not try it apart.
        on = {layer.partition(":")[0] for layer in here.strict["layers"]} - {"shared_memory"}
        assert on == {name for name, layer in here.layers.items() if layer["is_offered"]}


@pytest.mark.promise("Seeing sandboxes", "For each layer, `moonpool sandbox` …")
def test_only_root_has_users_to_give(here: Told) -> None:
    offer = here.layers["own_user"]
    assert offer["is_offered"] == (here.user == 0)
    if here.user != 0:
        assert "only root" in offer["why"]


@pytest.mark.promise("Seeing sandboxes", "For each layer, `moonpool sandbox` …")
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("call", "error", "layer", "words"),
    [
        ("landlock_create_ruleset", errno.ENOSYS, "landlock", "lsm="),
        ("landlock_restrict_self", errno.EPERM, "landlock", "Operation not permitted"),
        ("seccomp", errno.EINVAL, "seccomp", "CONFIG_SECCOMP_FILTER"),
    ],
    ids=["no-landlock", "landlock-refused", "no-seccomp"],
)
def test_without_a_layer_that_strict_needs_it_does_not_work(
    user: str, call: str, error: int, layer: str, words: str
) -> None:
    answer = told(user, **{call: error})

    # The cgroup does not depend on the call.
    layers = {name: each for name, each in answer.layers.items() if name != "cgroup"}
    missing = {name for name, each in layers.items() if not each["is_offered"]}
    assert missing - {"own_user"} == {layer}
    assert words in answer.layers[layer]["why"]
    assert not answer.strict["works"]
    assert layer in answer.strict["why"]
    assert answer.code == 1


@pytest.mark.promise("Seeing sandboxes", "For each layer, `moonpool sandbox` …")
@pytest.mark.parametrize("user", USERS)
def test_without_namespaces_strict_works_and_says_so(user: str) -> None:
    answer = told(user, unshare=errno.EPERM)

    assert not answer.layers["namespaces"]["is_offered"]
    advice = "give the container CAP_SYS_ADMIN" if answer.user == 0 else "allow user namespaces"
    assert advice in answer.layers["namespaces"]["why"]
    if answer.user == 0 and "cannot read" in answer.strict["why"]:
        # Without mounts of its own, an instance's user has no way to an interpreter below a closed folder.
        assert "chmod" in answer.strict["why"]
    else:
        assert answer.strict["works"]
        assert any("namespaces" in sentence for sentence in answer.strict["left_out"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has users to give")
def test_a_root_that_may_not_change_its_user_is_told_so() -> None:
    answer = told("self", setresuid=errno.EPERM)

    assert "CAP_SETUID" in answer.layers["own_user"]["why"]


def test_it_is_a_line_for_each_layer_and_what_strict_is() -> None:
    text = subprocess.run(
        ASK, capture_output=True, text=True, check=False, env=environment(), timeout=PATIENCE_S
    ).stdout

    first, *lines = text.splitlines()
    assert os.uname().release in first
    assert [line.split()[0] for line in lines[: len(LAYERS)]] == list(LAYERS)
    assert all(line.split()[1] in ("yes", "no") for line in lines[: len(LAYERS)])
    assert lines[len(LAYERS)].startswith("strict ")
