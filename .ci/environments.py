"""Makes environments of other Pythons than this one for the tests of models under them.

    python .ci/environments.py FOLDER
    python .ci/environments.py --find 3.12

Makes one for each version from 3.9 up that this machine has, in a folder of that name. If the machine has none, it uses
Debian's python3, or this Python. Each environment has numpy and nothing else. `--find` prints an interpreter of that
version, or this one if the machine has none, and makes nothing.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys

PLACES = (
    os.path.join(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")), "versions/*/bin/python3"),
    *(os.path.join(folder, "python3*") for folder in ("/usr/local/bin", "/usr/bin", "/opt/*/bin")),
)
OWN = sys.version_info[:3]


def version_of(python: str) -> tuple[int, ...]:
    code = "import sys; print(*sys.version_info[:3])"
    done = subprocess.run([python, "-Ic", code], capture_output=True, text=True, check=False)
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else ()


def others() -> dict[tuple[int, ...], str]:
    """Return the first interpreter of each version other than this one's."""
    found: dict[tuple[int, ...], str] = {}
    for place in PLACES:
        for python in sorted(glob.glob(place)):
            # python3-config and similar programs lie beside it.
            is_python = re.fullmatch(r"python3(\.\d+)?", os.path.basename(python))
            version = version_of(python) if is_python else ()
            if version >= (3, 9) and version != OWN:
                found.setdefault(version, python)
    return found


def environment(python: str, version: tuple[int, ...], folder: str) -> None:
    """Make a virtual environment with numpy, without pip and ensurepip, which Debian's Python lacks."""
    major, minor, _ = version
    root = os.path.join(folder, ".".join(map(str, version)))
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run([python, "-m", "venv", "--without-pip", root], check=True)
    packages = f"{root}/lib/python{major}.{minor}/site-packages"
    wanted = ["--python-version", f"{major}.{minor}", "--only-binary", ":all:", "numpy"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", packages]
    subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
    # Compiles what models import, where pip would compile all of numpy's own tests.
    subprocess.run([f"{root}/bin/python", "-c", "import numpy"], check=True)


def find(wanted: str) -> str:
    """Return an interpreter of that version, or this one."""
    fitting = [python for version, python in others().items() if ".".join(map(str, version)).startswith(f"{wanted}.")]
    return fitting[0] if fitting else sys.executable


def main() -> None:
    if sys.argv[1] == "--find":
        print(find(sys.argv[2]))  # noqa: T201
        return
    folder = os.path.abspath(sys.argv[1])
    found = others()
    if not found and shutil.which("apt-get"):
        for arguments in (["update"], ["install", "--yes", "python3"]):
            subprocess.run(["apt-get", "--quiet=2", *arguments], check=True, stdout=sys.stderr)
        found = others()
    if not found:
        sys.stderr.write("There is no other Python here; models run under this one.\n")
        found = {OWN: sys.executable}
    for version, python in sorted(found.items()):
        environment(python, version, folder)


if __name__ == "__main__":
    main()
