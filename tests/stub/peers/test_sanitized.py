"""The compiled ports of a stub with the sanitizers for addresses and undefined behaviour: its tests, and what fuzzing
knows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.runtime.lane.built import STUB_CALLS, STUB_PORT, sanitized

ROOT = Path(__file__).parents[3]
# Puts the sanitized modules in the places of the installed ones, and runs the tests.
PROGRAM = """
import importlib.util, sys
import pytest
from moonpool.stub import peers

def loaded(name, path):
    spec = importlib.util.spec_from_file_location(f"moonpool.stub.peers.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module
    setattr(peers, name, module)
    return module

modules = [loaded("_stub_port", sys.argv[1]), loaded("_stub_calls", sys.argv[2])]
status = pytest.main([*sys.argv[3:], "-q", "-p", "no:cacheprovider"])
assert [peers._stub_port, peers._stub_calls] == modules
sys.exit(status)
"""
TESTS = (
    "tests/stub/hosts/test_usual_asks.py",
    "tests/stub/peers/test_port.py",
    "tests/fuzz/test_targets.py::test_known_inputs_do_no_harm[execute]",
    "tests/fuzz/test_targets.py::test_variants_of_known_inputs_do_no_harm[execute]",
)


# What several threads of a model do at once.
THREADS = ("tests/stub/hosts/test_usual_asks.py", "tests/stub/hosts/test_call_readers.py")


@pytest.mark.promise(
    "The wire", "The compiled code of stubs runs its tests with the sanitizers for addresses and undefined behaviour."
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_compiled_port_touches_no_memory_but_its_own(tmp_path: Path) -> None:
    options = {
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",  # so that the sanitizer sees every object
    }
    ended = ended_with(tmp_path, "address,undefined", options, TESTS)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_threads_of_a_model_that_ask_at_once_do_not_race(tmp_path: Path) -> None:
    ended = ended_with(tmp_path, "thread", {"TSAN_OPTIONS": "exitcode=66"}, THREADS)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout


def ended_with(
    folder: Path, sanitizers: str, options: dict[str, str], tests: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run these tests with the extensions compiled so."""
    port, libraries = sanitized(folder, sanitizers, *STUB_PORT)
    calls, _ = sanitized(folder, sanitizers, *STUB_CALLS)
    path = [str(ROOT), str(Path(sys.modules["moonpool"].__path__[0]).parent)]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(port), str(calls), *tests],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": libraries, "PYTHONPATH": os.pathsep.join(path), **options},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
