"""Starts the image of `deploy/image.sh` as a pod would, asks it, and ends it.

    unshare --net --mount --pid --fork --mount-proc python .ci/container.py IMAGE

Theory of operation. umoci unpacks the image, and runc starts it with what the manifests in `deploy/kubernetes` say: a
read-only root, scratch in memory, no new privileges, no capability, a user without rights, and every model at `strict`.
The filter of system calls is the one that podman and CRI-O use by default, if this machine has their file. Once more it
is root in the container, with the five capabilities that give each model a user of its own. The network is that of this
program, so it must have one of its own.

Needs root, umoci and runc.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parent.parent
FILTER = Path("/usr/share/containers/seccomp.json")
SERVE = ["--model-repository=/mnt/models", "--model-control-mode=explicit", "--load-model=primes", "--sandbox=strict"]
SERVE += ["--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--exit-timeout-secs=30"]
# Those of deploy/README.md.
FIVE = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_SETGID", "CAP_SETUID"]
STARTING_S, ENDING_S = 120, 60
# So many primes are at most 30.
PRIMES = 10


def filter_of_calls(capabilities: list[str]) -> dict[str, Any]:
    """Return the default filter of podman in runc's form, as it is for a container with these capabilities."""
    told = json.loads(FILTER.read_text())

    def is_meant(rule: dict[str, Any]) -> bool:
        needs, unless = rule.get("includes", {}), rule.get("excludes", {})
        return (
            set(needs.get("caps", ())) <= set(capabilities)
            and not set(unless.get("caps", ())) & set(capabilities)
            and "amd64" in needs.get("arches", ["amd64"])
            and "amd64" not in unless.get("arches", ())
        )

    calls = []
    for rule in filter(is_meant, told["syscalls"]):
        kept = {name: rule[name] for name in ("names", "action", "args", "errnoRet") if rule.get(name) is not None}
        calls.append(kept)
    return {
        "defaultAction": told["defaultAction"],
        "defaultErrnoRet": told.get("defaultErrnoRet", 1),
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": calls,
    }


def configure(bundle: Path, user: int, capabilities: list[str]) -> None:
    """Write what runc reads: what the image says, and what the manifests of a pod say."""
    file = bundle / "config.json"
    config = json.loads(file.read_text())
    process = config["process"]
    words = process["args"][: process["args"].index("serve") + 1]
    config["process"] = {
        **process,
        "terminal": False,
        "args": [*words, *SERVE],
        "user": {"uid": user, "gid": user},
        "noNewPrivileges": True,
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
    }
    config["root"]["readonly"] = True
    in_memory = {"/dev/shm": "64m", "/tmp": "256m", **({} if user else {"/run": "16m"})}
    kept = [each for each in config["mounts"] if each["destination"] not in in_memory]
    for place, size in in_memory.items():
        options = ["nosuid", "nodev", "mode=1777", f"size={size}"]
        kept.append({"destination": place, "type": "tmpfs", "source": "tmpfs", "options": options})
    models = str(TREE / "examples/models")
    kept.append({"destination": "/mnt/models", "type": "bind", "source": models, "options": ["rbind", "ro"]})
    config["mounts"] = kept
    linux = config["linux"]
    linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] not in ("network", "user")]
    linux.pop("uidMappings", None)
    linux.pop("gidMappings", None)
    linux["resources"] = {
        "memory": {"limit": 4 << 30},
        "pids": {"limit": 1024},
        "devices": [{"allow": False, "access": "rwm"}],
    }
    if FILTER.exists():
        linux["seccomp"] = filter_of_calls(capabilities)
    file.write_text(json.dumps(config))


def ask(path: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:8000{path}", data, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + STARTING_S
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit(f"the container ended with status {server.returncode}")
        try:
            ask("/v2/health/ready")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    server.kill()
    sys.exit("the container was not ready in time")


def serve(bundle: Path, user: int, capabilities: list[str]) -> None:
    """Start the container, ask it, and end it with SIGTERM."""
    configure(bundle, user, capabilities)
    name = f"moonpool-{user}-{time.time_ns()}"
    began = time.monotonic()
    server = subprocess.Popen(["runc", "run", "--bundle", bundle, name], stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(server)
        started = time.monotonic()
        body = {"inputs": [{"name": "LIMIT", "datatype": "INT64", "shape": [1, 1], "data": [30]}]}
        answer = json.loads(ask("/v2/models/primes/infer", body))["outputs"]
        inside = ["/usr/local/bin/moonpool", "sandbox", "--json"]
        told = subprocess.run(["runc", "exec", name, *inside], stdout=subprocess.PIPE, text=True, check=False).stdout
        strict = json.loads(told)["strict"]
        subprocess.run(["runc", "kill", name, "TERM"], check=True)
        asked = time.monotonic()
        status = server.wait(ENDING_S)
    finally:
        subprocess.run(["runc", "delete", "--force", name], check=False, stderr=subprocess.DEVNULL)
    ended = time.monotonic()
    if status != 0 or not strict["works"] or answer[0]["data"] != [PRIMES]:
        sys.exit(f"user {user}: status {status} after SIGTERM, strict {strict}, answer {answer}")
    print(f"user {user}: ready after {started - began:.1f} s, ended {ended - asked:.1f} s after SIGTERM")
    print(f"  strict has {', '.join(strict['layers'])}, and is without {'; '.join(strict['left_out']) or 'nothing'}")


def main() -> None:
    image = Path(sys.argv[1])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if not FILTER.exists():
        print(f"The container runs without a filter of system calls: there is no {FILTER}.")
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder, "bundle")
        subprocess.run(["umoci", "unpack", "--image", f"{image}:moonpool", bundle], check=True)
        serve(bundle, 10001, [])
        serve(bundle, 0, FIVE)


if __name__ == "__main__":
    main()
