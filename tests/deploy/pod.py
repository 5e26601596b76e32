"""A container of a pod, as far as a machine without Kubernetes can make it, and its kubelet. For root:

    unshare --mount --net --pid --fork --kill-child --mount-proc python -m tests.deploy.pod FILE

FILE has the pod's specification, the folder of models and an empty folder, as JSON. The container has what the
specification says: user and group, capabilities, no new privileges, the file system and its volumes, the ports in a
network of its own. Its process has the number 1, and the system calls are refused that the default filters of container
runtimes keep from a container without CAP_SYS_ADMIN. The image is this Python with its packages. Cgroups and the hook
before the end are left out.

The kubelet probes the container as the specification says, asks it with Triton's clients, and ends it. What it has seen
is printed as JSON. A container without probes runs to its end.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests import lesser_kernel
from tests.waiting import Deadline, wait_until

import moonpool

ROOT = Path(__file__).parents[2]
SOURCE = Path(moonpool.__path__[0]).parent
# Each call is refused with EPERM; clone3 as if the kernel did not know it, as its flags cannot be filtered.
REFUSED = ("unshare", "setns", "mount", "umount2", "pivot_root", "keyctl", "bpf", "perf_event_open")
STARTING_S = 150.0
_APART = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_PATIENCE_S = 170.0
# A container has folders of its own there, so nothing of ours may lie in one of them.
_HIDDEN = ("/tmp", "/run", "/dev", "/proc", "/mnt")
Spec = Mapping[str, Any]


class Container:
    """The first container of a pod, before it runs."""

    def __init__(self, pod: Spec, models: Path, root: Path) -> None:
        self._pod, self._models, self._root = pod, models, root
        self.spec: Spec = pod["containers"][0]
        # The container's own settings go before those of the pod.
        self._security = {**pod.get("securityContext", {}), **self.spec["securityContext"]}
        self.ports = {each["name"]: each["containerPort"] for each in self.spec.get("ports", ())}
        self.grace_s: float = pod.get("terminationGracePeriodSeconds", 30)

    def command(self) -> list[str]:
        """Return the words that start it, once the file system is there."""
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--root", self._root]
        program = [*self.spec["command"], *self.spec.get("args", ())]
        return [*map(str, apart), *self._as_the_user(), *self._filtered(program)]

    def _as_the_user(self) -> list[str]:
        security = dict(self._security)
        words = ["setpriv", "--clear-groups"]
        if security.pop("runAsNonRoot", False) and not security["runAsUser"]:
            raise ValueError("the user is root")
        words += [f"--reuid={security.pop('runAsUser')}", f"--regid={security.pop('runAsGroup')}"]
        if removed := _removed(security.pop("capabilities", {})):
            words += [f"--{which}={removed}" for which in ("bounding-set", "inh-caps")]
        if security.pop("allowPrivilegeEscalation", True) is False:
            words.append("--no-new-privs")
        # Filtered and mounted elsewhere.
        if unknown := security.keys() - {"seccompProfile", "readOnlyRootFilesystem"}:
            raise ValueError(f"nothing here does {unknown}")
        return [*words, "--"]

    def _filtered(self, program: list[str]) -> list[str]:
        if self._security.get("seccompProfile") != {"type": "RuntimeDefault"}:
            return program
        words = [*(f"{name}=EPERM" for name in REFUSED), "clone3=ENOSYS"]
        return [sys.executable, lesser_kernel.__file__, *words, "--", *program]

    def environment(self) -> dict[str, str]:
        """Return its variables."""
        return {"PATH": "/image/bin:/usr/bin:/bin", "PYTHONPATH": str(SOURCE), "HOME": "/"}

    def make_files(self) -> None:
        """Make its file system: the image and the volumes."""
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", self._root)
        here = {ROOT, SOURCE, Path(sys.prefix), Path(sys.base_prefix)}
        for path in sorted(here | set(map(Path, ("/usr", "/etc", "/sys")))):
            self._bind(path, path)
        for name in ("bin", "lib", "lib64", "sbin"):
            if (link := Path("/", name)).is_symlink():
                (self._root / name).symlink_to(os.readlink(link))
            elif link.exists():
                self._bind(link, link)
        self._make_program()
        for name in ("proc", "dev", "run"):
            (self._root / name).mkdir()
        run("mount", "--rbind", "/dev", self._root / "dev")
        self._mount_volumes()
        if self._security.get("readOnlyRootFilesystem"):
            run("mount", "-o", "remount,ro", self._root)

    def _make_program(self) -> None:
        """Make the command that the package installs."""
        program = self._root / "image" / "bin" / "moonpool"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m moonpool "$@"\n')
        program.chmod(0o755)

    def _mount_volumes(self) -> None:
        volumes = {each["name"]: each for each in self._pod.get("volumes", ())}
        mounts = self.spec.get("volumeMounts", ())
        places = {each["mountPath"]: volumes[each["name"]] for each in mounts}
        # KServe adds this one itself.
        places.setdefault("/mnt/models", {"persistentVolumeClaim": {}})
        places.setdefault("/tmp", {"emptyDir": {}})
        for place, volume in places.items():
            target = self._root / place.lstrip("/")
            if "emptyDir" in volume:
                target.mkdir(parents=True, exist_ok=True)
                run("mount", "-t", "tmpfs", "-o", "mode=777", "tmpfs", target)
            else:
                self._bind(self._models, Path(place))

    def _bind(self, source: Path, place: Path) -> None:
        target = self._root / str(place).lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", "-o", "ro", source, target)


def _removed(capabilities: Spec) -> str:
    """Return what setpriv takes from all capabilities. Without `drop`, a container here has all of them, as if it were
    privileged.
    """
    changed = [("-", capabilities.get("drop", ())), ("+", capabilities.get("add", ()))]
    return ",".join(sign + name.lower() for sign, names in changed for name in names)


def run(*words: object) -> None:
    subprocess.run(list(map(str, words)), check=True)


def raise_loopback() -> None:
    """Bring the loopback of this network namespace up."""
    set_flags, is_up = 0x8914, 0x1
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", is_up))


class Kubelet:
    """Probes a container, asks it and ends it."""

    def __init__(self, container: Container, process: subprocess.Popen[bytes]) -> None:
        self._container, self._process = container, process

    def probe(self, name: str) -> bool:
        """Return True if the probe of this name succeeds now."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the container ended with {self._process.returncode}")
        asked = self._container.spec[name]["httpGet"]
        port = self._container.ports.get(asked["port"], asked["port"])
        try:
            self.get(port, asked["path"])
        except (OSError, urllib.error.URLError):
            return False
        return True

    @staticmethod
    def get(port: int, path: str) -> str:
        """Return what is at a path. Raises URLError for a status that is no success."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60.0) as answer:
            text: str = answer.read().decode()
        return text

    def watch(self) -> dict[str, object]:
        """Return what it sees from the start to the end."""
        deadline = Deadline(STARTING_S)
        wait_until(lambda: self.probe("startupProbe"), deadline, "the probe of the start")
        wait_until(lambda: self.probe("readinessProbe"), deadline, "the probe of readiness")
        seen: dict[str, object] = {"is_live": self.probe("livenessProbe")}
        http, grpc_port = self._options("http-port", 8000), self._options("grpc-port", 8001)
        seen["answers"] = [ask_http(http), ask_grpc(grpc_port)]
        seen["health"] = health(grpc_port)
        overview = json.loads(self.get(http, "/v2/moonpool/overview"))
        (model,) = overview["models"]
        seen["sandbox"] = model["instances"][0]["sandbox"]
        seen["metrics"] = self.get(8002, "/metrics")
        seen["exit_code"] = self.end()
        return seen

    def _options(self, name: str, default: int) -> int:
        found = [each for each in self._container.spec["args"] if each.startswith(f"--{name}=")]
        return int(found[0].partition("=")[2]) if found else default

    def end(self) -> int:
        """Send SIGTERM to the container's first process, and return the exit code. Raises TimeoutExpired after the
        grace period.
        """
        pid = self._process.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        return self._process.wait(self._container.grace_s)


def ask_http(port: int) -> list[int]:
    """Count primes, over HTTP."""
    # Containers that are not asked do not wait for the clients.
    import tritonclient.http

    limit = tritonclient.http.InferInput("LIMIT", [1, 1], "INT64")
    limit.set_data_from_numpy(np.array([[100]], np.int64))
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return [*map(int, client.infer("primes", [limit]).as_numpy("COUNT").ravel())]


def ask_grpc(port: int) -> list[int]:
    """Count primes, over gRPC."""
    import tritonclient.grpc

    limit = tritonclient.grpc.InferInput("LIMIT", [1, 1], "INT64")
    limit.set_data_from_numpy(np.array([[100]], np.int64))
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return [*map(int, client.infer("primes", [limit]).as_numpy("COUNT").ravel())]


def health(port: int) -> int:
    """Return what a probe of gRPC gets: 1 is SERVING."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        return int(check(b"", timeout=60.0)[1])


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    raise_loopback()
    container = Container(given["pod"], Path(given["models"]), Path(given["root"]))
    container.make_files()
    if "readinessProbe" not in container.spec:
        sys.exit(subprocess.run(container.command(), env=container.environment()).returncode)
    process = subprocess.Popen(container.command(), env=container.environment(), stdout=sys.stderr.fileno())
    sys.stdout.write(json.dumps(Kubelet(container, process).watch()))


def run_pod(pod: Spec, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a pod whose models are those of `folder / "models"`, as a process of its own."""
    root, given = folder / "root", folder / "pod.json"
    root.mkdir()
    (folder / "models").mkdir(exist_ok=True)
    given.write_text(json.dumps({"pod": pod, "models": str(folder / "models"), "root": str(root)}))
    path = os.pathsep.join(map(str, (ROOT, SOURCE)))
    return subprocess.run(
        ["unshare", *_APART, sys.executable, "-m", "tests.deploy.pod", str(given)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
    )


@cache
def can_run() -> bool:
    """Return True if this user may make a container."""
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    ours = (ROOT, SOURCE, Path(sys.prefix), Path(sys.base_prefix))
    if any(path.is_relative_to(hidden) for path in ours for hidden in _HIDDEN):
        return False
    program = ["unshare", *_APART, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    ended = subprocess.run(program, stderr=subprocess.DEVNULL, check=False)
    return ended.returncode == 0


if __name__ == "__main__":
    main()
