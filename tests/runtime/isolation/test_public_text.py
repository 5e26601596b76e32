"""The texts of errors for readers outside of the process."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool import InvalidRequest, LoadFailed, ModelError, OutOfMemory, StubDied
from moonpool.ipc.denials import OPEN, WRITE, would_allow
from moonpool.ipc.errors import BadTensor, MoonpoolError
from moonpool.runtime.errors import BadEnvironment, HookFailed, own
from moonpool.runtime.hosting.model_control import loading
from moonpool.runtime.isolation.public_text import public_text, scrubbed
from moonpool.runtime.model.config.source import ConfigError
from moonpool.runtime.process.files import RepositoryError
from moonpool.runtime.schedule.failures import no_instance_left

pytestmark = pytest.mark.promise(
    "What a stub says",
    "The text of a confined model's error has no folders, addresses or source when it leaves a server.",
)

TRACEBACK = """cannot open it
Traceback (most recent call last):
  File "/srv/models/m/1/model.py", line 12, in execute
    secret = open("/etc/shadow")
             ^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/codecs.py", line 7, in open
    raise FileNotFoundError(2)
FileNotFoundError: [Errno 2] No such file: '/etc/shadow'"""


def confined(text: str) -> ModelError:
    error = ModelError(text)
    error.is_confined = True
    return error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[Errno 13] Permission denied: '/root/.ssh/id_rsa'", "[Errno 13] Permission denied: 'id_rsa'"),
        ("no file '/srv/my models/a b.txt' here", "no file 'a b.txt' here"),
        ("/opt/venv/bin/python3.11 said: no", "python3.11 said: no"),
        ("PATH=/usr/local/bin:/usr/bin", "PATH=bin:bin"),
        ("see file:///srv/models/m/model.py", "see model.py"),
        ("folder /srv/models/ is empty", "folder  is empty"),
        ("<Thing object at 0x7f2c4d1e9a90>", "<Thing object at 0x…>"),
        ("no, At:\n  /srv/m/1/model.py(12): execute\n", "no, At:\n  model.py(12): execute\n"),
        (
            TRACEBACK,
            "cannot open it\nTraceback (most recent call last):\n"
            '  File "model.py", line 12, in execute\n  File "codecs.py", line 7, in open\n'
            "FileNotFoundError: [Errno 2] No such file: 'shadow'",
        ),
    ],
)  # fmt: skip
def test_a_confined_model_s_error_has_no_folders_addresses_or_source(text: str, shown: str) -> None:
    assert public_text(confined(text)) == shown
    assert str(confined(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "expected 3 and/or 4 of 5/6, not 1.5e-3 at 10 m/s",
        "https://example.com/v2/models is not asked",
        "shape [1, 2] / [3]",
        "/x is short",
        "0x1f is small",
        "ümläute und so",
    ],
)
def test_texts_that_are_not_paths_stay(text: str) -> None:
    assert scrubbed(text) == text


NAMES = st.lists(st.text("abcXYZ019_-.", min_size=1), min_size=2)


@given(NAMES, st.sampled_from(["{}", "no '{}'", 'File "{}", line 3', "({})", "<{}>", "a={}, b"]))
def test_a_path_is_cut_to_its_last_name_wherever_it_stands(names: list[str], around: str) -> None:
    assert scrubbed(around.format("/" + "/".join(names))) == around.format(names[-1])


def test_others_texts_stay_as_they_are() -> None:
    for error in (ModelError(TRACEBACK), InvalidRequest("no '/a/b/c'")):
        assert public_text(error) == str(error)


# Those whose texts are what the reader has sent, and those of models that are not contained. All others lose their
# folders.
AS_THEY_ARE = {"client": (InvalidRequest, BadTensor, ModelError), "contained": (InvalidRequest, BadTensor)}


def kinds(of: type[MoonpoolError] = MoonpoolError) -> list[type[MoonpoolError]]:
    below = [kind for each in of.__subclasses__() for kind in kinds(each)]
    return [of, *below] if of.__module__.partition(".")[0] == "moonpool" else below


@pytest.mark.parametrize("reader", AS_THEY_ARE)
def test_every_kind_of_error_has_one_redaction_for_every_reader(reader: str) -> None:
    """Also of kinds that come later: what is not in the table has no folder for anybody."""
    assert {LoadFailed, ConfigError, RepositoryError, BadEnvironment, HookFailed} <= set(kinds())
    text = f"{TRACEBACK}\nat 0x7f2c4d1e9a90, models/m/config.pbtxt:3: no"
    for kind in kinds():
        error = kind.__new__(kind, text)
        error.args = (text,)
        shown = public_text(error, is_for_contained=reader == "contained")
        if issubclass(kind, AS_THEY_ARE[reader]):
            assert shown == str(error), kind
        else:
            assert not re.search("srv|etc|secret|7f2c|models/", shown), kind
            assert "config.pbtxt:3: no" in shown, kind


def test_a_load_that_a_plain_model_failed_is_as_in_triton_for_clients() -> None:
    failure = LoadFailed("ValueError: no\n\nAt:\n  /srv/m/1/model.py(3): initialize\n")
    failure.is_confined = False

    with pytest.raises(LoadFailed) as raised, loading("m"):
        raise failure
    assert "/srv/m/1/model.py(3)" in public_text(raised.value)
    told = public_text(raised.value, is_for_contained=True)
    assert "At:\n  model.py(3): initialize" in told
    assert "/srv" not in told


def test_a_failed_load_tells_no_last_words_of_its_process() -> None:
    died = StubDied("It exited with 1; /usr/bin/python said: secret", "It exited with 1")

    with pytest.raises(LoadFailed) as raised, loading("m"):
        raise died
    assert "secret" in str(raised.value)
    told = "load failed for model 'm': Internal: It exited with 1;\n; see the server's log"
    assert public_text(raised.value) == told


def test_moonpool_s_own_words_have_no_paths_at_any_level() -> None:
    assert public_text(OutOfMemory("cannot map /dev/shm/thing")) == "cannot map thing"
    died = StubDied("It exited with 1; /usr/bin/python said: secret", "It exited with 1")
    assert public_text(died) == "It exited with 1; see the server's log"
    assert public_text(own(died), "r7") == "It exited with 1; see the server's log (request id: r7)"
    left = no_instance_left("m", "m_0 gave up: /usr/bin/python said: secret")
    assert public_text(left) == ("Request for model 'm' which has no instance left; see the server's log")


def test_an_unforeseen_error_has_a_general_text() -> None:
    error = FileNotFoundError(2, "No such file", "/srv/secret")
    assert public_text(error, "r7") == "internal error; see the server's log (request id: r7)"


@pytest.mark.promise(
    "Seeing sandboxes",
    "If an error or the log names an option, the text contains nothing that a shell or "
    "`config.pbtxt` would obey, and clients learn no folder from it.",
)
@pytest.mark.parametrize("kind", [OPEN, WRITE])
@pytest.mark.parametrize(
    "path",
    [
        "/srv/secret/data/file",
        "/srv/secret name/data/file",
        "/srv/a=secret/data/file",
        "/srv/a|b/secret/data/file",
        "/srv/(a)/secret/data/file",
        "/srv/a'b/secret/data/file",
        "/srv/a:b/secret/data/file",
        "/srv/gr\u00fcn/secret/data/file",
    ],
)
def test_no_folder_is_in_the_option_that_would_allow_what_was_refused(kind: int, path: str) -> None:
    text = scrubbed(f"the sandbox refused it: {would_allow(kind, path)}")
    assert "MOONPOOL_SANDBOX_PATHS" in text
    assert "secret" not in text
    assert "/" not in text


@pytest.mark.parametrize(
    "piece", ["@", "a/", "/@", "'/", "'/a", "0xaaaaaaa", "file:", "models/", 'File "', "config.pbtxt"]
)
def test_long_words_of_a_model_take_no_time_to_speak_of(piece: str) -> None:
    # If each character could begin a path, this would take hours.
    assert len(scrubbed(piece * (1 << 20 >> 3))) > 0


@pytest.mark.parametrize("end", ["'/home/my name/my secret'", "/home/name/secret", "/home/name/a'b"])
def test_a_text_that_is_too_long_to_be_searched_is_cut_and_no_path_in_two(end: str) -> None:
    most = len(scrubbed("x y " * 100_000))
    assert most < 100_000
    # Wherever it is cut, no part of the path is left that would not be found any more.
    for before in range(most - len(end) - 9, most + 3, 2):
        text = ("x y " * (before // 4 + 1))[:before] + f" {end} and so on" + " z" * 1000
        shown = scrubbed(text)
        assert len(shown) < len(text)
        assert shown.startswith(text[: before - 9])
        assert not {"home", "name"} & set(re.findall("[a-z]+", shown)), before
