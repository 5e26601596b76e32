"""The launcher, as the library inside tritonserver sees it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.refused_threads import refuse_threads
from tests.runtime.triton.conftest import Start, Write
from tests.runtime.triton.doubles import CONFIG, DOUBLES, tensor, with_options
from tests.runtime.triton.shim import Shim, ShimHere
from tests.waiting import wait_until

from moonpool.ipc.errors import CODES, PeerGone
from moonpool.ipc.messages import NO_CORE, PROTOCOL_VERSION, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.triton.messages import FIRST_REGION, LAUNCHER_VERSION, Word


def test_a_launcher_says_what_it_speaks(shim: Shim) -> None:
    _, version, protocol, _, pid = shim.hello

    assert (version, protocol, pid) == (LAUNCHER_VERSION, PROTOCOL_VERSION, shim.process.pid)


def test_a_stub_that_was_started_answers_the_shim(start: Start) -> None:
    stub = start()

    assert stub.infer([1, 2, 3]) == [2, 4, 6]


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "A model in a tritonserver finalizes when it is unloaded or replaced, for as long as its configuration says.",
)
def test_an_instance_that_is_ended_is_finalized_first(shim: Shim, start: Start, tmp_path: Path) -> None:
    stub = start(f"{DOUBLES}\n    def finalize(self):\n        open({str(tmp_path / 'end')!r}, 'x')")

    shim.end(stub)

    assert (tmp_path / "end").exists()
    assert not os.path.exists(f"/proc/{stub.pid}")


@pytest.mark.promise("The launcher of a tritonserver", "A model in a tritonserver finalizes …")
def test_an_instance_that_does_not_finalize_in_time_is_ended(shim: Shim, start: Start) -> None:
    text = f"{DOUBLES}\n    def finalize(self):\n        import time; time.sleep(1000)"
    stub = start(text, with_options(MOONPOOL_FINALIZE_TIMEOUT_S="0.1"))

    shim.end(stub)

    assert not os.path.exists(f"/proc/{stub.pid}")


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "If a stub dies, the log says why. It is started again after ever longer pauses, until no "
    "restarts are left. A restart that fails counts as a death.",
)
def test_a_stub_that_died_is_explained_and_started_again(shim: Shim, start: Start) -> None:
    stub = start()
    stub.kill()
    with pytest.raises(PeerGone):
        stub.infer([1])

    _, _, generation, code, message, restarts_in_ms = shim.lose(stub)

    assert (generation, code, restarts_in_ms) == (1, 1, 0)
    assert "killed by SIGKILL" in message
    assert message.endswith("during execute.")
    assert shim.hear(Word.STARTED)[2] == 2
    assert shim.stubs[shim.number_of(shim.stubs[2])].infer([4]) == [8]


def test_a_stub_that_died_without_requests_was_idle(shim: Shim, start: Start) -> None:
    stub = start()
    stub.kill()

    assert shim.lose(stub, is_executing=False)[4].endswith("while it was idle.")


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "A stub that broke the protocol, before or after it was started, is killed. Clients learn "
    "that it was, and the log has the details.",
)
def test_a_stub_that_broke_the_protocol_is_killed_and_the_details_are_told(shim: Shim, start: Start) -> None:
    stub = start()

    message = shim.lose(stub, why="ANSWER.batch may not be -1")[4]

    assert message.startswith("Stub process 'm_0' broke the protocol and was ended")
    wait_until(lambda: not os.path.exists(f"/proc/{stub.pid}"))
    shim.wait_for_note("ANSWER.batch may not be -1")


@pytest.mark.promise("The launcher of a tritonserver", "If a stub dies, the …")
def test_ever_longer_pauses_lie_before_ever_more_restarts_until_there_are_no_more(shim: Shim, start: Start) -> None:
    options = {"MOONPOOL_MAX_RESTARTS": "2", "MOONPOOL_RESTART_BACKOFF_S": "2"}
    start(config=with_options(**options))
    pauses = []
    for _ in range(3):
        stub = shim.stubs[2]
        stub.kill()
        *_, message, restarts_in_ms = shim.lose(stub)
        pauses.append(restarts_in_ms)
        if restarts_in_ms is not None:
            shim.hear(Word.STARTED)

    assert pauses[0] == 0
    assert 0 < pauses[1] <= 2000
    assert pauses[2] is None
    assert "it died 3 times within 60 s" in message
    assert "it is started again after 60 s" in message


@pytest.mark.promise("The launcher of a tritonserver", "An instance that was given up …")
def test_an_instance_that_was_given_up_is_started_again_after_a_rest(shim: Shim, start: Start) -> None:
    options = {"MAX_RESTARTS": "0", "RESTART_WINDOW_S": "0.5", "RESTART_BACKOFF_MAX_S": "0.5"}
    start(config=with_options(**{f"MOONPOOL_{name}": value for name, value in options.items()}))
    for generation in (1, 2):
        stub = shim.stubs[2]
        stub.kill()
        *_, restarts_in_ms = shim.lose(stub)
        assert restarts_in_ms is None
        assert shim.hear(Word.STARTED, Word.DIED)[:3] == [Word.STARTED, 2, generation + 1]
    assert shim.stubs[2].infer([1.5]) == [3.0]


@pytest.mark.promise("The launcher of a tritonserver", "An instance that was given up …")
def test_an_instance_that_rests_can_be_ended(shim: Shim, start: Start) -> None:
    stub = start(config=with_options(MOONPOOL_MAX_RESTARTS="0"))
    stub.kill()
    assert shim.lose(stub)[-1] is None
    shim.end(stub)


@pytest.mark.promise("The launcher of a tritonserver", "A lack of descriptors in …")
def test_a_server_that_has_no_room_for_a_process_costs_the_model_no_death(shim: Shim, start: Start) -> None:
    """The model may not restart at all, so a single death would be its end."""
    start(config=with_options(MOONPOOL_MAX_RESTARTS="0"))
    for _ in range(3):
        *_, message, restarts_in_ms = shim.lose(
            shim.stubs[2], is_executing=False, is_shortage=True, why="no descriptor"
        )
        assert restarts_in_ms is not None
        assert "the server has no room for it: no descriptor" in message
        shim.hear(Word.STARTED)


@pytest.mark.promise("The launcher of a tritonserver", "If a stub dies, the …")
def test_a_restart_that_fails_is_a_death_of_its_own(shim: Shim, start: Start, tmp_path: Path) -> None:
    stub = start(config=with_options(MOONPOOL_MAX_RESTARTS="1"))
    (tmp_path / "m" / "1" / "model.py").write_text("raise OSError('no disk')")
    stub.kill()
    shim.lose(stub)

    _, _, generation, _, message, restarts_in_ms = shim.hear(Word.DIED)

    assert (generation, restarts_in_ms) == (2, None)
    assert "no disk" in message


@pytest.mark.promise("The launcher of a tritonserver", "A process that has served long …")
def test_a_process_that_has_served_long_enough_is_replaced(shim: Shim, start: Start) -> None:
    stub = start(config=with_options(MOONPOOL_MAX_RESTARTS="0", MOONPOOL_RECYCLE_REQUESTS="2"))
    number = shim.number_of(stub)

    shim.tell(Word.RENEW, number, 1, 2)

    assert shim.hear(Word.STARTED, Word.DIED)[:3] == [Word.STARTED, number, 2]
    assert shim.stubs[number].infer([1]) == [2]
    because = "it has executed 2 requests; MOONPOOL_RECYCLE_REQUESTS is 2"
    shim.wait_for_note(f"[m_0] is started anew: {because}", 0)


@pytest.mark.promise("The launcher of a tritonserver", "A model in a tritonserver finalizes …")
def test_a_process_that_does_not_finalize_in_time_is_replaced_all_the_same(shim: Shim, start: Start) -> None:
    text = f"{DOUBLES}\n    def finalize(self):\n        import time; time.sleep(1000)"
    stub = start(text, with_options(MOONPOOL_FINALIZE_TIMEOUT_S="0.1"))

    shim.tell(Word.RENEW, shim.number_of(stub), 1, 2)

    assert shim.hear(Word.STARTED, Word.DIED)[:3] == [Word.STARTED, 2, 2]


def test_an_instance_that_is_being_replaced_can_be_ended(shim: Shim, start: Start) -> None:
    stub = start()
    number = shim.number_of(stub)

    shim.tell(Word.RENEW, number, 1, 2)
    shim.tell(Word.END, number)

    assert shim.hear(Word.ENDED) == [Word.ENDED, number]


@pytest.mark.promise("The launcher of a tritonserver", "A process that has served long …")
def test_a_process_that_holds_too_much_memory_is_told_of(shim: Shim, start: Start) -> None:
    text = "KEPT = []\n" + DOUBLES.replace("requests):\n", "requests):\n        KEPT.append(b'x' * (150 << 20))\n")
    stub = start(text, with_options(MOONPOOL_RECYCLE_RSS_BYTES="100M"))
    stub.infer([1])

    assert shim.hear(Word.GROWN) == [Word.GROWN, 2, 1]


@pytest.mark.promise(
    "The launcher of a tritonserver", "The launcher ignores messages about a process that has already ended."
)
def test_messages_about_an_earlier_generation_are_ignored(shim: Shim, start: Start) -> None:
    first = start()
    first.kill()
    number = shim.number_of(first)
    shim.lose(first)
    shim.hear(Word.STARTED)

    shim.tell(Word.LOST, number, 1, True, False, "")
    shim.tell(Word.OVERDUE, number, 1)

    assert shim.stubs[number].infer([1]) == [2]


@pytest.mark.promise("The launcher of a tritonserver", "A batch over its time ends its process, with a reason.")
def test_a_batch_that_takes_too_long_is_ended(shim: Shim, start: Start) -> None:
    text = "import time\nclass TritonPythonModel:\n    def execute(self, _):\n        time.sleep(1000)"
    stub = start(text, with_options(MOONPOOL_EXECUTE_TIMEOUT_S="0.5"))
    block = [stub.requests.id, 0, 0]
    stub.work.send(Kind.EXECUTE, 1, NO_CORE, [], [block], b"\x91\x90", None, None)

    shim.tell(Word.OVERDUE, 2, 1)
    with pytest.raises(PeerGone):
        stub.answer()

    _, _, _, code, message, _ = shim.lose(stub)
    assert (code, message) == (4, "Stub process 'm_0' took longer than 0.5 s to execute a batch and was ended")


@pytest.mark.promise("The launcher of a tritonserver", "If a model does not start, the error is in its own words.")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("import os\nos._exit(7)", "exited with 7"),
    ],
)
def test_a_model_that_does_not_start_is_refused_with_its_own_words(
    shim: Shim, write: Write, text: str, expected: str
) -> None:
    ready = shim.load(write(f"{text}\nclass TritonPythonModel: ...\n"), CONFIG)
    shim.begin_start(ready[1])

    word, _, _, message = shim.hear(Word.STARTED, Word.REFUSED)

    assert word == Word.REFUSED
    assert expected in message


@pytest.mark.promise("The launcher of a tritonserver", "A stub that broke the …")
def test_a_stub_that_breaks_the_protocol_before_it_is_started_is_refused(shim: Shim, write: Write) -> None:
    ready = shim.load(write("import time\ntime.sleep(1000)\nclass TritonPythonModel: ..."), CONFIG)
    number = shim.begin_start(ready[1])
    shim.hear(Word.BORN)

    shim.tell(Word.LOST, number, 1, False, False, "LOG.level may not be 9")

    *_, message = shim.hear(Word.REFUSED)
    assert message == "Stub process 'm_0' broke the protocol and was ended: LOG.level may not be 9"


def test_an_instance_that_is_starting_can_be_ended(shim: Shim, write: Write) -> None:
    ready = shim.load(write("import time\ntime.sleep(1000)\nclass TritonPythonModel: ..."), CONFIG)
    number = shim.begin_start(ready[1])
    shim.hear(Word.BORN)

    shim.tell(Word.END, number)

    assert shim.hear(Word.ENDED) == [Word.ENDED, number]


@pytest.mark.promise(
    "Executing in a tritonserver",
    "Memory of an instance grows as far as the model's limit, the machine and the "
    "server's control groups allow. Beyond that, a request is refused.",
)
def test_memory_is_set_aside_for_an_instance_as_far_as_it_may_have_it(shim: Shim, start: Start) -> None:
    stub = start(DOUBLES, with_options(MOONPOOL_REGION_LIMIT_BYTES=str(1 << 24)))
    number = shim.number_of(stub)
    asked = (number, stub.generation, Side.STUB)

    shim.tell(Word.MEMORY, 1001, *asked, FIRST_REGION, 1 << 20, 5000)
    assert shim.hear(Word.SET_ASIDE, Word.REFUSED) == [Word.SET_ASIDE, 1001, 1 << 20]
    SharedRegion.adopt(FIRST_REGION, 1 << 20, *shim.fds).close()
    # Sizes are rounded up to whole pages.
    shim.tell(Word.MEMORY, 1002, *asked, FIRST_REGION + 1, 4096, 5000)
    assert shim.hear(Word.SET_ASIDE, Word.REFUSED) == [Word.SET_ASIDE, 1002, 8192]
    SharedRegion.adopt(FIRST_REGION + 1, 8192, *shim.fds).close()
    for wanted in (1 << 25, (1 << 63) - 1):
        shim.tell(Word.MEMORY, wanted, *asked, FIRST_REGION + 2, 1 << 20, wanted)
        word, question, _, message = shim.hear(Word.SET_ASIDE, Word.REFUSED)
        assert (word, question) == (Word.REFUSED, wanted)
        assert "raise MOONPOOL_REGION_LIMIT_BYTES" in message
    # This question is about a stub that has ended.
    shim.tell(Word.MEMORY, 1003, number + 1, *asked[1:], FIRST_REGION + 3, 1 << 20, 4096)
    assert shim.hear(Word.SET_ASIDE, Word.REFUSED)[:2] == [Word.REFUSED, 1003]


@pytest.mark.promise("Containment", "All shared memory that a contained …")
def test_memory_that_came_back_counts_and_is_set_aside_again(shim: Shim, start: Start) -> None:
    options = {"MOONPOOL_REGION_LIMIT_BYTES": str(8 << 20), "MOONPOOL_SANDBOX": "strict"}
    stub = start(DOUBLES, with_options(**options))
    number = shim.number_of(stub)
    asked = (number, stub.generation, Side.STUB)
    files = []
    for region in range(FIRST_REGION, FIRST_REGION + 3):
        shim.tell(Word.MEMORY, region, *asked, region, 1 << 20, 4 << 20)
        assert shim.hear(Word.SET_ASIDE, Word.REFUSED) == [Word.SET_ASIDE, region, 4 << 20]
        files.append(os.fstat(shim.fds[0]).st_ino)
        os.close(shim.fds[0])
        shim.tell(Word.RETURNED, *asked, region)
    assert len(set(files)) == 1
    # The process may have kept the returned regions, so 5 of the 8 MiB are not available.
    shim.tell(Word.MEMORY, 1, *asked, FIRST_REGION + 3, 1 << 20, 5 << 20)
    assert shim.hear(Word.SET_ASIDE, Word.REFUSED)[:2] == [Word.REFUSED, 1]
    # These messages name a later generation, and a stub that does not exist.
    shim.tell(Word.RETURNED, number, stub.generation + 1, Side.STUB, FIRST_REGION)
    shim.tell(Word.RETURNED, number + 1, 1, Side.STUB, FIRST_REGION)
    shim.tell(Word.MEMORY, 2, number, stub.generation + 1, Side.STUB, FIRST_REGION, 0, 4096)
    assert shim.hear(Word.SET_ASIDE, Word.REFUSED)[:2] == [Word.REFUSED, 2]


@pytest.mark.promise("Executing in a tritonserver", "Memory of an instance grows as …")
def test_more_memory_than_the_machine_has_is_refused(shim: Shim, start: Start) -> None:
    stub = start()

    shim.tell(Word.MEMORY, 1001, shim.number_of(stub), stub.generation, Side.STUB, FIRST_REGION, 1 << 20, 1 << 50)

    word, _, _, message = shim.hear(Word.SET_ASIDE, Word.REFUSED)
    assert word == Word.REFUSED
    assert f"cannot set aside {1 << 50} bytes of shared memory: " in message


@pytest.mark.promise("Executing in a tritonserver", "The text of a contained …")
def test_an_error_text_is_logged_whole_and_returned_without_folders(shim: Shim, write: Write) -> None:
    ready = shim.load(write(DOUBLES), with_options(MOONPOOL_LOG_LINES_PER_S="10"))

    shim.tell(Word.SCRUB, 1001, ready[1], "no file '/srv/a/b.txt'")

    assert shim.hear(Word.SCRUBBED) == [Word.SCRUBBED, 1001, "no file 'b.txt'"]
    shim.wait_for_note("model 'm': no file '/srv/a/b.txt'", 2)
    for _ in range(30):
        shim.tell(Word.SCRUB, 1002, ready[1], "/srv/a/b\n" * 10_000)
        assert shim.hear(Word.SCRUBBED)[:2] == [Word.SCRUBBED, 1002]
    # A repeated message is not logged for ever.
    assert sum("/srv/a/b" in text for _, text in shim.notes) < 30 * 100


@pytest.mark.promise("Readiness", "If the file of a model …")
def test_a_model_that_is_not_there_is_refused(shim: Shim, tmp_path: Path) -> None:
    word, _, _, message = shim.load(tmp_path / "nothing", CONFIG)

    assert word == Word.REFUSED
    assert message.startswith("Python model file not found in ")
    shim.wait_for_note(f"Failed to preinitialize Python stub: {message}", 0)


def test_an_option_that_there_is_not_is_refused(shim: Shim, write: Write) -> None:
    word, _, code, message = shim.load(write(DOUBLES), with_options(MOONPOOL_SANDBOXX="strict"))

    assert (word, code) == (Word.REFUSED, 3)
    assert 'did you mean "MOONPOOL_SANDBOX"?' in message


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "A model completes its configuration in a process of its own; fields of newer servers stay as they are.",
)
def test_a_model_completes_its_configuration(shim: Shim, write: Write) -> None:
    text = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "A", "data_type": "TYPE_INT32", "dims": [4]})
        config.add_output({"name": "B", "data_type": "TYPE_INT32", "dims": [4]})
        config.set_max_batch_size(8)
        config.set_model_transaction_policy({"decoupled": True})
        return config
    def execute(self, requests): ...
"""
    given = {"backend": "python", "a_field_of_next_year": 0, "max_batch_size": 0}

    _, _, config, _, largest, inputs, outputs, *_ = shim.load(write(text), given, completes=True)

    assert (largest, inputs, outputs) == (8, ["A"], ["B"])
    assert '"a_field_of_next_year": 0' in config
    assert '"max_batch_size": 8' in config
    assert '"decoupled": true' in config


def test_a_model_that_completes_nothing_changes_nothing(shim: Shim, write: Write) -> None:
    assert shim.load(write(DOUBLES), CONFIG, completes=True)[2] is None


@pytest.mark.promise(
    "The launcher of a tritonserver", "START may be longer than the memory that a stub begins with can hold."
)
def test_a_configuration_may_be_longer_than_a_packet(shim: Shim, write: Write) -> None:
    many = [tensor(f"X{number}") for number in range(4000)]
    # No more than a page of memory in each direction.
    little = with_options(MOONPOOL_REGION_BYTES="4K")

    ready = shim.load(write(DOUBLES), {**little, "input": many})

    assert ready[5] == [each["name"] for each in many]
    assert shim.start(ready[1]).started is not None


def test_deaths_and_loads_leave_nothing_behind_in_the_launcher(shim: Shim, write: Write) -> None:
    def held() -> tuple[int, int, int]:
        files = os.listdir(f"/proc/{shim.process.pid}/fd")
        threads = os.listdir(f"/proc/{shim.process.pid}/task")
        maps = Path(f"/proc/{shim.process.pid}/maps").read_text()
        return len(files), len(threads), maps.count("memfd:moonpool")

    def live() -> None:
        ready = shim.load(write(DOUBLES), CONFIG, completes=True)
        stub = shim.start(ready[1])
        number = shim.number_of(stub)
        stub.kill()
        shim.lose(stub)
        shim.hear(Word.STARTED)
        stub = shim.stubs[number]
        assert stub.infer([1]) == [2]
        shim.end(stub)
        shim.tell(Word.END_MODEL, ready[1])
        shim.hear(Word.ENDED)

    live()
    before = held()
    for _ in range(3):
        live()

    def is_as_before() -> bool:
        return all(now <= then for now, then in zip(held(), before, strict=True))

    wait_until(is_as_before, what=f"no more files, threads and regions than {before}")


@pytest.mark.promise("The launcher of a tritonserver", "Launcher and stubs end with the …")
def test_stubs_end_with_the_launcher(shim: Shim, start: Start) -> None:
    stub = start()

    shim.process.kill()

    with pytest.raises(PeerGone):
        shim.hear(Word.DIED)
    with pytest.raises(PeerGone):
        stub.answer()
    wait_until(lambda: not os.path.exists(f"/proc/{stub.pid}"))


@pytest.mark.promise(
    "The launcher of a tritonserver",
    "Launcher and stubs end with the server, and stubs with the launcher, however it ends.",
)
def test_launcher_and_stubs_end_with_the_server(shim: Shim, start: Start) -> None:
    stub = start()

    shim.close()

    assert shim.process.returncode == 0
    assert not os.path.exists(f"/proc/{stub.pid}")


@pytest.mark.promise("Lifecycle", "A stub, and each program …")
def test_a_stub_starts_with_default_dispositions_though_the_launcher_ignores_signals(
    start: Start, tmp_path: Path
) -> None:
    ignored = "[n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN]"
    start(f"import signal\nopen({str(tmp_path / 'seen')!r}, 'w').write(repr({ignored}))\n{DOUBLES}")

    assert (tmp_path / "seen").read_text() == "['SIGPIPE', 'SIGXFSZ']"


def test_signals_to_the_server_and_its_children_do_not_end_a_launcher(shim: Shim, start: Start) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        shim.process.send_signal(number)

    assert start().infer([1]) == [2]


@pytest.mark.promise("At the limits", "If no thread can be started …")
def test_a_launcher_without_a_thread_refuses_what_needs_one_and_goes_on(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    unavailable, why = CODES.index("UNAVAILABLE"), "can't start new thread"
    shim = ShimHere()
    try:
        with monkeypatch.context() as patch:
            refuse_threads(patch, "moonpool-load")
            word, number, code, text = shim.load(write(DOUBLES), CONFIG)
            assert (word, number, code, why in text) == (Word.REFUSED, 1, unavailable, True)
        word, model, *said = shim.load(write(DOUBLES), CONFIG)
        assert word == Word.MODEL_READY, said
        with monkeypatch.context() as patch:
            refuse_threads(patch, "moonpool-start")
            instance = shim.begin_start(model)
            word, number, code, text = shim.hear(Word.REFUSED)
            assert (number, code, why in text) == (instance, unavailable, True)
        stub = shim.start(model)
        with monkeypatch.context() as patch:
            refuse_threads(patch, "moonpool-grow")
            number = shim.number_of(stub)
            shim.tell(Word.MEMORY, 99, number, 1, Side.RUNTIME, FIRST_REGION, 0, 4096)
            word, number, code, text = shim.hear(Word.REFUSED, Word.SET_ASIDE)
            assert (word, number, code, why in text) == (Word.REFUSED, 99, unavailable, True)
        with monkeypatch.context() as patch:
            # These cannot be refused.
            refused = refuse_threads(patch, "moonpool-")
            assert stub.infer([1]) == [2]
            shim.end(stub)
            shim.tell(Word.END_MODEL, model)
            assert shim.hear(Word.ENDED) == [Word.ENDED, model]
            assert {"moonpool-end", "moonpool-unload"} <= set(refused)
    finally:
        shim.close()
