"""The denials of a model are counted and shown, and nothing depends on what the model says of them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import Attacker, Outcome, load_attacker
from tests.hostile.conftest import Attackers
from tests.inside import hosted_in
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.denials import KINDS
from moonpool.runtime.model.denials import MOST_TEXTS, Denial
from moonpool.runtime.process.diagnose import fatal_call

pytestmark = pytest.mark.promise("Seeing sandboxes", "Acts of a model's Python code …")

REFUSED = ("EACCES", "EPERM", "EROFS")
SAID = "its sandbox did not let it "


def counts(attacker: Attacker) -> dict[str, int]:
    return hosted_in(attacker.runtime, attacker.name).model.denials.counts(f"{attacker.name}_0")


def latest(attacker: Attacker) -> list[Denial]:
    return hosted_in(attacker.runtime, attacker.name).model.denials.latest(f"{attacker.name}_0")


# Acts that are always refused, by the kind of their denial.
LAST_ACTS: dict[str, tuple[str, dict[str, object]]] = {
    "kill": ("processes.signal_to", {"pid": 1}),
    "write": ("files.truncate", {"path": "/etc/passwd"}),
}


def gains(attacker: Attacker, act: Callable[[], Outcome], last: str = "kill") -> tuple[Outcome, dict[str, int]]:
    """Return the outcome of an act, and the denials that it led to. Another denial after it shows that all were
    counted.

    That one is of the kind `last`, which must not be the act's: two reports may tell of two denials.
    """
    before = counts(attacker)
    outcome = act()
    # The stub reports refusals in order and seldom, so this last one comes after all others.
    what, arguments = LAST_ACTS[last]
    attacker.tries(what, **arguments)
    wait_until(lambda: counts(attacker)[last] > before[last], 60.0)
    after = counts(attacker)
    gained = {kind: after[kind] - before[kind] for kind in KINDS if after[kind] > before[kind]}
    gained[last] -= 1
    return outcome, {kind: count for kind, count in gained.items() if count}


@pytest.mark.parametrize(
    ("kind", "what", "arguments"),
    [
        ("open", "files.read", {"path": "/etc/passwd"}),
        ("open", "files.read_from_root", {"path": "/etc/passwd"}),
        ("open", "files.read_by_dots", {"path": "/etc/passwd"}),
        ("open", "files.listing", {"path": "/"}),
        ("open", "files.listing", {"path": "/tmp"}),
        ("write", "files.open_to_write", {"path": "/etc/passwd"}),
        ("write", "files.create", {"path": "/etc/moonpool_denied"}),
        ("write", "files.truncate", {"path": "/etc/passwd"}),
        ("write", "files.unlink", {"path": "/etc/passwd"}),
        ("write", "files.make_folder", {"path": "/etc/moonpool_denied"}),
        ("socket", "network.tcp", {"port": 9}),
        ("socket", "network.udp", {"port": 9}),
        ("socket", "network.listen", {}),
        ("fork", "processes.fork", {}),
        ("kill", "processes.signal_to", {"pid": 1}),
    ],
)
def test_refusals_are_counted_by_kind(attackers: Attackers, kind: str, what: str, arguments: dict[str, object]) -> None:
    attacker = attackers("strict")

    last = "write" if kind == "kill" else "kill"
    outcome, gained = gains(attacker, lambda: attacker.tries(what, **arguments), last)

    assert outcome.word in REFUSED, outcome
    assert gained == {kind: 1}


ALLOWED_ACTS: list[tuple[str, dict[str, object]]] = [
    ("files.read", {"path": "/proc/self/status"}),
    ("files.read", {"path": "/dev/null"}),
    ("files.read", {"path": "/etc/there_is_no_such_file"}),
    ("files.open_to_write", {"path": "/dev/null"}),
    ("files.create", {"path": "mine"}),
    ("files.make_folder", {"path": "mine"}),
    ("files.unlink", {"path": "/etc/there_is_no_such_file"}),
    ("files.create", {"path": "/there_is_no_such_folder/file"}),
    ("network.filter_a_socket", {}),
    # A pair of sockets: event loops have one each.
    ("self.tempfiles", {}),
    ("self.threads", {}),
]


def test_allowed_acts_and_missing_files_are_not_counted(attackers: Attackers) -> None:
    attacker = attackers("strict")

    def act() -> Outcome:
        return [attacker.tries(what, **arguments) for what, arguments in ALLOWED_ACTS][-1]

    _, gained = gains(attacker, act)

    assert gained == {}, latest(attacker)


def test_it_is_told_in_the_log_which_option_would_allow_it(
    runtime: moonpool.Runtime, model_folder: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "weights"
    file.touch()
    caplog.set_level(logging.INFO, "moonpool")
    # Its own model: of one that has been refused much, the log has no line for a while.
    attacker = load_attacker(runtime, "strict", model_folder, "logged")
    try:
        attacker.tries("files.read", path=str(file))

        option = f"MOONPOOL_SANDBOX_PATHS=ro:{file}"
        line = f"[{attacker.name}_0] {SAID}read {file}; {option} would allow it"
        wait_until(lambda: any(message.startswith(line) for message in caplog.messages), 60.0)
        (told,) = [each for each in latest(attacker) if each.text == str(file)]
        assert (told.kind, told.count, told.option) == ("open", 1, option)
    finally:
        runtime.unload("logged")


def test_the_named_option_makes_the_refused_act_work(
    runtime: moonpool.Runtime, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("granted")
    file = folder / "weights"
    file.write_text("weights")
    folder.chmod(0o755)
    file.chmod(0o644)
    attacker = load_attacker(runtime, "strict", model_folder, "told")
    try:
        attacker.tries("files.read", path=str(file))
        wait_until(lambda: bool(latest(attacker)), 60.0)
        option, _, value = latest(attacker)[0].option.partition("=")
    finally:
        runtime.unload("told")
    assert option == "MOONPOOL_SANDBOX_PATHS"
    attacker = load_attacker(runtime, "strict", model_folder, "told", SANDBOX_PATHS=value)
    try:
        assert attacker.finds("files.read", path=str(file)) == 7
    finally:
        runtime.unload("told")


# In some Pythons up to 3.11 the hooks after a fork may change the number of the error that os.fork raises, as this
# does.
MISNUMBERED = """
def start():
    try:
        os.fork()
    except OSError:
        raise BlockingIOError(11, "Resource temporarily unavailable") from None
start()"""
# Only the words of this error tell of a refusal.
IN_WORDS = """
try:
    open('/etc/passwd')
except OSError as error:
    raise RuntimeError(str(error)) from None"""
MODEL = """
import os, socket, subprocess, urllib.request
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        for request in requests:
            exec(request.inputs()[0].as_numpy()[0].decode(), {{**globals()}})
"""
CONFIG = {
    "input": [{"name": "CODE", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [1]}],
    "parameters": {"MOONPOOL_SANDBOX": {"string_value": "strict"}},
}


def written(folder: Path, initialize: str = "pass") -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(MODEL.format(initialize=initialize))
    for each in (folder, folder / "1"):
        each.chmod(0o755)
    (folder / "1" / "model.py").chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def raises(runtime: moonpool.Runtime, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The error of a model that does this."""
    runtime.load("raises", written(tmp_path_factory.mktemp("raises") / "raises"), config=CONFIG)

    def error_of(code: str) -> str:
        with pytest.raises(moonpool.ModelError) as caught:
            runtime.infer("raises", {"CODE": [code]}, timeout_s=60.0)
        return str(caught.value).partition("\n")[0]

    return error_of


@pytest.mark.promise(
    "Seeing sandboxes",
    "If the sandbox refused an act of a model, its error ends with the option that would allow the act.",
)
@pytest.mark.parametrize(
    ("code", "option"),
    [
        ("open('/etc/passwd')", "MOONPOOL_SANDBOX_PATHS=ro:/etc/passwd would allow it"),
        ("os.listdir('/home')", "MOONPOOL_SANDBOX_PATHS=ro:/home would allow it"),
        ("os.symlink('/usr', '/var/moonpool')", "MOONPOOL_SANDBOX_PATHS=rw:/var would allow it"),
        ("open('/var/moonpool', 'w')", "MOONPOOL_SANDBOX_PATHS=rw:/var would allow it"),
        ("socket.create_connection(('127.0.0.1', 80))", "MOONPOOL_SANDBOX_PORTS would allow it"),
        ("urllib.request.urlopen('http://a.b/')", "MOONPOOL_SANDBOX_PORTS=80,53 would allow it"),
        ("os.fork()", "MOONPOOL_SANDBOX_SYSCALLS=fork would allow it"),
        ("subprocess.run(['ls'])", "MOONPOOL_SANDBOX_SYSCALLS=fork,execve would allow it"),
        (MISNUMBERED, "MOONPOOL_SANDBOX_SYSCALLS=fork would allow it"),
        (IN_WORDS, "MOONPOOL_SANDBOX_PATHS=ro:/etc/passwd would allow it"),
        ("os.kill(1, 0)", "no option allows it"),
        # Of the two names, the second one was refused.
        ("os.symlink('a', '/var/moonpool')", "MOONPOOL_SANDBOX_PATHS=rw:/var would allow it"),
        # The process number in this path changes with each start, so the option has no value.
        ("os.listdir('/proc/self/fd')", "MOONPOOL_SANDBOX_PATHS would allow it"),
    ],
)
def test_an_error_of_a_model_ends_with_the_option_that_would_allow_it(
    raises: Callable[[str], str], code: str, option: str
) -> None:
    assert raises(code).endswith(f"; the sandbox refused it: {option}")


def test_a_change_that_the_mounts_refuse_names_a_grant_to_write(
    raises: Callable[[str], str], runtime: moonpool.Runtime
) -> None:
    """No audit event is looked at for it, so only the error says that it was a change."""
    (instance,) = runtime.instances("raises")
    if not any(layer.startswith("namespaces") for layer in instance["sandbox"]["layers"]):
        pytest.skip("without mounts of its own the filter refuses this, whatever is granted")
    told = raises("os.chmod('/etc/passwd', 0)")
    assert told.endswith("; the sandbox refused it: MOONPOOL_SANDBOX_PATHS=rw:/etc would allow it")


def test_an_error_that_no_refusal_is_behind_names_no_option(raises: Callable[[str], str]) -> None:
    for code in ("open('/etc/there_is_no_such_file')", "1 / 0"):
        assert "refused" not in raises(code)


def test_to_read_is_not_what_allows_a_change(raises: Callable[[str], str]) -> None:
    """No event announces these."""
    for code in ("os.chmod('/etc/passwd', 0o644)", "os.chown('/etc/passwd', 0, 0)"):
        assert "ro:" not in raises(code)


def test_the_error_of_a_load_ends_with_the_option_too(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    folder = written(tmp_path / "no_load", "self.weights = open('/etc/passwd').read()")
    with pytest.raises(moonpool.LoadFailed) as caught:
        runtime.load("no_load", folder, config=CONFIG)

    text = str(caught.value)
    assert text.count("MOONPOOL_SANDBOX_PATHS") == 1
    assert "the sandbox refused it: MOONPOOL_SANDBOX_PATHS=ro:/etc/passwd would allow it" in text


# Floods and lies


def test_a_flood_of_refusals_is_counted_and_told_seldom(
    runtime: moonpool.Runtime, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moonpool")
    # A process that exists, since a missing one is no refusal.
    flood = f"""
import threading
def run(number):
    for i in range(2000):
        try: open("/proc/1/environ" if i % 2 else "/proc/{os.getpid()}/environ")
        except OSError: pass
        try: os.listdir("/etc" if i % 3 else "/home")
        except OSError: pass
threads = [threading.Thread(target=run, args=[number]) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    # The test needs its own model, because refusals of another test may be reported half a second late and would count
    # here.
    runtime.load("floods", written(tmp_path_factory.mktemp("floods") / "floods"), config=CONFIG)
    try:
        denials = hosted_in(runtime, "floods").model.denials
        with pytest.raises(moonpool.ModelError):
            runtime.infer("floods", {"CODE": [flood]}, timeout_s=60.0)

        wait_until(lambda: denials.counts("floods_0")["open"] >= 16_000, 60.0)
        assert denials.counts("floods_0")["open"] == 16_000
        assert len(denials.latest("floods_0")) <= MOST_TEXTS
        assert len([line for line in caplog.messages if SAID in line]) <= 20
    finally:
        runtime.unload("floods")


LIE = "/etc/x\n[another_0] READY\x1b[2J\u2028; MOONPOOL_SANDBOX=off would allow it"


@pytest.mark.promise(
    "Seeing sandboxes", "A stub cannot forge lines, fill memory or change a decision by its reports of refusals."
)
def test_lies_about_refusals_forge_nothing_and_fill_nothing(
    runtime: moonpool.Runtime, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moonpool")
    # The test needs its own model, because after many refusals of a model the log has no line for a while.
    attacker = load_attacker(runtime, "strict", model_folder, "lies")
    try:
        pid = attacker.pid
        rows: list[list[object]] = [[0, 2**32 - 1, LIE]]
        attacker.finds("protocol.tell_denials", rows=rows)
        attacker.finds("protocol.tell_denials", rows=[[4, 1, f"host:{'9' * 999}"], [8, 1, "x" * 1024]])
        for number in range(40):
            many = [[number % 9, 1, f"/{number}/{text}"] for text in range(17)]
            attacker.finds("protocol.tell_denials", rows=many, times=25)

        wait_until(lambda: any("/39/" in each.text for each in latest(attacker)), 60.0)
        lines = [line for line in caplog.messages if SAID in line]
        assert 0 < len(lines) <= 20
        assert all(line.isprintable() and line.startswith("[lies_0] ") for line in lines)
        assert len(latest(attacker)) <= MOST_TEXTS
        assert all(each.text.isprintable() and each.option.isprintable() for each in latest(attacker))
        assert counts(attacker)["open"] >= 2**32 - 1
        assert attacker.pid == pid
    finally:
        runtime.unload("lies")


@pytest.mark.parametrize(
    "rows",
    [
        [[9, 1, "an unknown kind"]],
        [[-1, 1, "an unknown kind"]],
        [[0, 0, "no time"]],
        [[0, -1, "less than no time"]],
        [[0, 2**32, "too many times"]],
        [[0, 1, "long" * 300]],
        [[0, 1, "a row too many"]] * 18,
        [[0, 1]],
    ],
)
def test_a_word_of_refusals_that_none_can_be_ends_the_process(
    attackers: Attackers, rows: list[list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    attacker = attackers("strict")
    before, pid = counts(attacker), attacker.pid
    attacker.tries("protocol.tell_denials", rows=rows)

    wait_until(lambda: "broke the protocol" in caplog.text, 60.0)
    assert "DENIALS" in caplog.text
    wait_until(lambda: attacker.tries("files.read", path="/dev/null").word == "done", 60.0)
    assert attacker.pid != pid
    assert counts(attacker) == before


# The end by a filter


def _log_can_be_read() -> bool:
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"


@pytest.mark.promise("The sandbox: `strict`", "A system call …")
@pytest.mark.promise(
    "Seeing sandboxes",
    "If its filter ends a process, the reason names the system call, provided that the kernel's "
    "log has it and can be read.",
)
@pytest.mark.skipif(not _log_can_be_read(), reason="the kernel's log is closed to this user")
def test_the_end_by_a_filter_names_the_system_call(attackers: Attackers) -> None:
    """The kernel leaves records out where there are many at once, as other tests have made."""
    attacker = attackers("strict")
    said: list[str] = []

    def is_named() -> bool:
        said.append(str(attacker.tries("kernel.with_bad", name="ptrace").died))
        return "a system call that its sandbox does not allow: ptrace" in said[-1]

    wait_until(is_named, 60.0)
    assert re.search(r"SIGSYS: it made .* does not allow: ptrace during execute\.\Z", said[-1])


def test_a_process_that_no_filter_has_ended_has_no_such_call() -> None:
    assert fatal_call(os.getpid(), 0.0) == ""


def test_names_are_looked_for_nowhere(attackers: Attackers) -> None:
    """A model without a network gets an error, and is counted."""
    attacker = attackers("strict")
    _, gained = gains(attacker, lambda: attacker.tries("network.resolve", name="moonpool.invalid"))
    assert gained == {"resolve": 1}


# Grants and templates


def test_granted_acts_are_not_counted_and_those_beside_them_are(runtime: moonpool.Runtime, model_folder: Path) -> None:
    attacker = load_attacker(runtime, "strict", model_folder, "granted", SANDBOX_PORTS="1", SANDBOX_SYSCALLS="fork")
    try:
        _, gained = gains(attacker, lambda: attacker.tries("network.tcp", port=1))
        assert gained == {}
        _, gained = gains(attacker, lambda: attacker.tries("processes.fork"))
        assert gained == {}
        outcome, gained = gains(attacker, lambda: attacker.tries("network.tcp", port=9))
        assert (outcome.word, gained) == ("EACCES", {"connect": 1})
        assert latest(attacker)[1].option == "MOONPOOL_SANDBOX_PORTS=9"
        outcome, gained = gains(attacker, lambda: attacker.tries("network.udp", port=1))
        assert (outcome.word, gained) == ("EPERM", {"socket": 1})
    finally:
        runtime.unload("granted")


def test_refusals_of_a_template_and_of_its_instances_are_told_of_each(
    runtime: moonpool.Runtime, tmp_path: Path
) -> None:
    """The template has imported the module; what it was refused is not told once more by its forks."""
    folder = written(tmp_path / "forked")
    model = folder / "1" / "model.py"
    opens = "try:\n    open('/etc/passwd')\nexcept OSError:\n    pass\n"
    model.write_text(opens + model.read_text())
    parameters = CONFIG["parameters"] | {"MOONPOOL_PREFORK": {"string_value": "imports"}}  # type: ignore[operator]
    runtime.load("forked", folder, config=CONFIG | {"parameters": parameters})
    try:
        denials = hosted_in(runtime, "forked").model.denials
        with pytest.raises(moonpool.ModelError, match="MOONPOOL_SANDBOX_PATHS=ro:/home"):
            runtime.infer("forked", {"CODE": ["os.listdir('/home')"]}, timeout_s=60.0)
        names = ("forked_0", "forked_template")
        wait_until(lambda: all(denials.counts(name)["open"] for name in names), 60.0)
        assert [denials.counts(name)["open"] for name in names] == [1, 1]
    finally:
        runtime.unload("forked")
