"""The session of HTTP/2, compiled with sanitizers, bears any frames in any order."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.lane.built import sanitized
from tests.server.grpc.serving import ROOT

SECONDS = 4


@pytest.mark.slow
@pytest.mark.promise(
    "gRPC",
    "No frames of a client make the compiled part read or write beyond its bounds; it is fuzzed with sanitizers.",
)
@pytest.mark.parametrize("what", ["fuzzing", "tests"])
def test_nothing_is_read_or_written_beyond_its_bounds(tmp_path: Path, what: str) -> None:
    module, libraries = sanitized(tmp_path, "address,undefined", "runtime/server/grpc/_http2", core=())
    seed = random.randrange(1 << 32)
    program = tmp_path / "program.py"
    program.write_text(
        "import importlib.machinery, importlib.util, sys\n"
        "import moonpool.runtime.server.grpc as package\n"
        "name = 'moonpool.runtime.server.grpc._http2'\n"
        f"loader = importlib.machinery.ExtensionFileLoader(name, {str(module)!r})\n"
        "module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))\n"
        "sys.modules[name] = package._http2 = module\n"
        f"assert module.__file__ == {str(module)!r}\n"
        f"if {what!r} == 'tests':\n"
        "    import pytest\n"
        "    options = ['-q', '-p', 'no:cacheprovider', 'tests/server/grpc/test_session.py', '-k', 'not library']\n"
        "    sys.exit(pytest.main(options))\n"
        "from tests.server.grpc.fuzzing import main\n"
        f"main({SECONDS}, {seed})\n"
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": libraries,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        # CPython frees nothing of its own at its end.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:exitcode=99",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    ended = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )

    assert ended.returncode == 0, f"seed {seed}:\n{ended.stdout}{ended.stderr[-6000:]}"
