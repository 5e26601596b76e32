"""Tests of the messages of models: they reach the log at the levels that are set at that moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import wait_until

import moonpool

CODE: Config = {"input": [tensor("CODE", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}

Say = Callable[[str], str]
# The levels that the model's process sends: info, warning, error, verbose.
LEVELS = "said = Logger.log_info.__globals__['_Route'].is_wanted"

pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture(scope="module")
def loaded(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "talks", MODELS / "talks.py", CODE):
        yield


@pytest.fixture
def say(runtime: moonpool.Runtime, loaded: None) -> Iterator[Say]:  # noqa: ARG001 - to be loaded
    """Run code in the model, and return what it left in `said`."""

    def run(code: str) -> str:
        answer = runtime.infer("talks", {"CODE": np.array([code.encode()], np.object_)})
        return bytes(answer["SAID"][0]).decode()

    yield run
    runtime.log_settings(log_info=True, log_warning=True, log_error=True, log_verbose_level=0)
    # A change is on its way to the stub beside the requests, and may arrive a moment after the next of them.
    wait_until(lambda: run(LEVELS) == "(True, True, True, False)")


def lines(runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages in the log, without their prefixes."""
    runtime.metrics()  # takes in what the stubs have sent until now
    messages = [record for record in caplog.records if record.name == "moonpool.stub"]
    caplog.clear()
    return [
        f"{record.levelname[0]} {record.getMessage().removeprefix('[talks_0] ').split(' (')[0]}" for record in messages
    ]


@pytest.mark.promise(
    "Log",
    "Levels of the log change while models run, for `Logger` and `logging` alike. Stubs that "
    "start later begin with the levels of that moment.",
)
def test_levels_change_while_a_model_runs(
    runtime: moonpool.Runtime, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    say("everything()")
    assert lines(runtime, caplog) == [
        "I Logger 0",
        "W Logger 1",
        "E Logger 2",
        "I talks: logging 0",
        "W talks: logging 1",
        "E talks: logging 2",
    ]

    def said() -> list[str]:
        say("everything()")
        return lines(runtime, caplog)

    # A change is on its way to the stub beside the requests, and may arrive a moment after the next of them.
    runtime.log_settings(log_info=False, log_error=False, log_verbose_level=1)
    wait_until(lambda: said() == ["W Logger 1", "D Logger 3", "W talks: logging 1", "D talks: logging 3"])

    runtime.log_settings(log_warning=False, log_verbose_level=0)
    wait_until(lambda: said() == [])


@pytest.mark.promise("Log", "Levels of the log change …")
def test_a_stub_that_is_started_later_has_the_settings_of_that_moment(
    runtime: moonpool.Runtime, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.log_settings(log_info=False, log_verbose_level=2)
    caplog.set_level(logging.DEBUG)
    runtime.unload("talks")
    runtime.load("talks", MODELS / "talks.py", config=CODE)
    say("everything()")

    assert [line[0] for line in lines(runtime, caplog)] == ["W", "E", "D"] * 2


def test_verbose_is_a_setting_like_the_others(runtime: moonpool.Runtime) -> None:
    with moonpool.Runtime(verbose=True) as loud:
        assert loud.log_settings() == {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 1}
    assert runtime.log_settings()["log_verbose_level"] == 0
    assert runtime.log_settings(log_verbose_level=3)["log_verbose_level"] == 3
    assert runtime.log_settings(log_verbose_level=0)["log_verbose_level"] == 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"log_info": 1}, "log_info must be true or false, not 1"),
        ({"log_verbose_level": True}, "log_verbose_level must be a whole number from 0 on, not True"),
        ({"log_verbose_level": -1}, "log_verbose_level must be a whole number from 0 on, not -1"),
        ({"log_file": "x"}, "no setting is called 'log_file'"),
    ],
)
def test_an_unknown_setting_is_refused_and_changes_nothing(
    runtime: moonpool.Runtime, changes: dict[str, int], error: str
) -> None:
    before = runtime.log_settings()
    with pytest.raises(moonpool.InvalidRequest, match=error):
        runtime.log_settings(**{"log_warning": False, **changes})

    assert runtime.log_settings() == before


def _forking(code: str) -> Any:
    return pytest.param(code, id=code, marks=pytest.mark.needs("processes"))


@pytest.mark.promise(
    "Log",
    "Messages that a model logs in its threads, finalizers and forks reach the log, also "
    "those of a fork made while a thread logged.",
)
@pytest.mark.parametrize(
    "code",
    [
        "in_thread(lambda: Logger.log_info('heard'))",
        _forking("said = in_fork(lambda: Logger.log_info('heard'))"),
        _forking("said = in_fork(lambda: in_fork(lambda: Logger.log_info('heard')))"),
        "Parting('heard'); gc.collect()",
        _forking("said = in_fork(lambda: (Parting('heard').text, gc.collect()))"),
    ],
)
def test_a_model_is_heard_from_wherever_it_speaks(
    runtime: moonpool.Runtime, say: Say, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    caplog.set_level(logging.INFO)

    assert say(code) in ("None", "0")
    assert lines(runtime, caplog) == ["I heard"]


@pytest.mark.promise("Log", "Messages of any kind, size and number harm neither the log nor other models.")
def test_messages_of_any_kind_and_size_do_no_harm(
    runtime: moonpool.Runtime, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    say(
        "Logger.log_info('x' * 10**7)\n"
        "Logger.log_info('surrogate \\ud800')\n"
        "Logger.log_info(b'bytes \\xff')\n"
        "Logger.log_info('')\n"
        "Logger.log_info('a\\x1b[31m\\rb\\x00')\n"
        "exec(compile('Logger.log_info(1 and \"odd file\")', '\\udcff' * 3000, 'exec'))\n"
    )

    assert lines(runtime, caplog) == [
        "I " + "x" * 8192,
        "I surrogate ?",
        "I bytes \\xff",
        "I ",
        "I a\\x1b[31m\\x0db\\x00",
        "I odd file",
    ]


# Floods come last, because they use up the lines that a model may log.


@pytest.mark.promise("Log", "Messages that a model logs …")
@pytest.mark.needs("processes")
def test_a_fork_is_heard_also_if_a_thread_spoke_when_it_was_made(
    runtime: moonpool.Runtime, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    said = say(
        "stop = threading.Event()\n"
        "def speak():\n"
        "    while not stop.is_set(): Logger.log_verbose('unheard'); Logger.log_info('noise')\n"
        "threads = [threading.Thread(target=speak) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "said = [in_fork(lambda: Logger.log_error('heard')) for _ in range(20)]\n"
        "stop.set()\n"
        "for thread in threads: thread.join()\n"
    )

    assert said == repr([0] * 20)
    # A flood loses some of its lines, and those of the forks may be among them.
    heard = lines(runtime, caplog)
    assert set(heard) >= {"I noise"}


@pytest.mark.promise("Log", "Messages of any kind, size and …")
def test_a_flood_of_messages_is_heard_in_part(
    runtime: moonpool.Runtime, say: Say, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    say("for number in range(20_000): Logger.log_info('line\\n' * 10)")
    heard = lines(runtime, caplog)

    # What was left out is told before the next line.
    def is_heard_again() -> bool:
        say("Logger.log_info('after')")
        heard.extend(lines(runtime, caplog))
        return "I after" in heard

    wait_until(is_heard_again)
    assert any("lines were left out: too many a second" in line for line in heard)
    assert 0 < heard.count("I line") < 100_000
