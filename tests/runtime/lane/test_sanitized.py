"""The compiled port under sanitizers: for bounds while requests and lies come, for races while all is used at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.lane.built import CALL_PORT, sanitized, skip_without_compiled

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _with_what_is_compiled() -> None:
    skip_without_compiled()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_read_or_written_beyond_its_bounds(tmp_path: Path) -> None:
    port_module, libraries = sanitized(tmp_path, "address,undefined")
    calls_module, _ = sanitized(tmp_path, "address,undefined", *CALL_PORT)
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.runtime.lane.stress import replaced\n"
        f"port = replaced('moonpool.ipc.port._port', {str(port_module)!r})\n"
        f"calls = replaced('moonpool.ipc.port._calls', {str(calls_module)!r})\n"
        "import moonpool.ipc.port.calls\n"
        "assert moonpool.ipc.port.compiled is port\n"
        "assert moonpool.ipc.port.calls.compiled is calls\n"
        "import pytest\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))\n"
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": libraries,
        # CPython frees nothing of its own at its end.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:exitcode=99",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    lies = ["runtime/stubs/test_link_lies.py", "runtime/stubs/calls", "ipc/port"]
    tests = [str(ROOT / "tests" / each) for each in ("runtime/lane", *lies)]
    # This test and the one with the other sanitizer are slow. What runs in Python has no bounds to break, and objects
    # are not counted where each has memory of malloc. Another one starts programs, which would have the port without
    # them.
    tests.append(f"--ignore={ROOT}/tests/runtime/lane/test_ends.py")
    tests += ["-m", "not slow", "-k", "not (Python or leave_no_objects)"]
    ended = subprocess.run(
        [sys.executable, str(program), *tests], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert "passed" in ended.stdout


@pytest.mark.promise(
    "The wire",
    "The compiled code runs under the sanitizer for threads while callers and models of many kinds use it at once.",
)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_threads_of_many_kinds_do_not_race(tmp_path: Path) -> None:
    port_module, libraries = sanitized(tmp_path, "thread")
    # The interpreter's lock is a mutex, which the sanitizer sees. It sees what the extension does, and the kernel's
    # calls of all.
    environment = {**os.environ, "LD_PRELOAD": libraries, "TSAN_OPTIONS": "halt_on_error=0:exitcode=66"}
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("stress.py")), str(port_module), str(tmp_path), "2"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert (ended.returncode, ended.stdout[:4]) == (0, "done"), ended.stderr[-4000:]
