"""A type checker knows the types of a model's imports where moonpool is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import moonpool
from moonpool.stub.native import hints

pytestmark = pytest.mark.promise(
    "Testing models", "Type checkers know the names that models import, and find mistakes in their use."
)

ROOT = Path(__file__).parents[2]
SOURCE = Path(moonpool.__path__[0]).parent
# `.ci/run pyright` installs this wheel, which brings its own node. Its rules are those of pyright, which Pylance runs.
PYRIGHT = ROOT / ".venv-pyright" / "bin" / "basedpyright"
STUBS = ["triton_python_backend_utils-stubs", "c_python_backend_utils-stubs"]

# Triton's documents write models like this.
MODEL = """
import json

import numpy as np
import c_python_backend_utils as c
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(8)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        output = pb_utils.get_output_config_by_name(config, "Y")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])

    def execute(
        self, requests: list[pb_utils.InferenceRequest]
    ) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if (x < 0).any():
                error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            output = c.Tensor("Y", np.sqrt(x + 1).astype(self.dtype))
            response = pb_utils.InferenceResponse(output_tensors=[output])
            if response.has_error():
                raise c.TritonModelException(response.error().message())
            responses.append(response)
        pb_utils.Logger.log("executed", pb_utils.Logger.INFO)
        return responses
"""
# The model asks everything that a model may ask of its host.
ASKER = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.family = pb_utils.MetricFamily(
            name="n", description="d", kind=pb_utils.MetricFamily.COUNTER
        )
        self.metric = self.family.Metric(labels={"model": args["model_name"]})
        self.histogram = pb_utils.MetricFamily("h", "d", pb_utils.MetricFamily.HISTOGRAM).Metric(labels={}, buckets=[1.0, 2])
        if not pb_utils.is_model_ready(model_name="other", model_version="1"):
            pb_utils.load_model(model_name="other", config="{}", files={"file:1/model.py": b""})

    async def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        for request in requests:
            self.metric.increment(1)
            sender = request.get_response_sender()
            if request.is_cancelled() or sender.is_cancelled():
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            ask = pb_utils.InferenceRequest(
                model_name="other",
                requested_output_names=["Y"],
                inputs=[pb_utils.Tensor("X", np.ones(3, np.float32)), *request.inputs()],
                request_id=request.request_id(),
                correlation_id=request.correlation_id(),
                preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
                trace=request.trace(),
                parameters={"a": 1, "b": "c", "d": True},
                timeout=5,
            )
            response = ask.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            y = pb_utils.get_output_tensor_by_name(response, "Y").as_numpy() + 1
            for each in ask.exec(decoupled=True):
                if len(each.output_tensors()) > 0:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
            one, two = await asyncio.gather(ask.async_exec(), ask.async_exec())
            one.output_tensors(), two.parameters()
            stream = await ask.async_exec(decoupled=True)
            stream.cancel()
            for each in stream:
                each.has_error()
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            sender.send(pb_utils.InferenceResponse(), flags=1)
            names: set[str] = request.requested_output_names()
            request.timeout() + len(names) + request.flags()
"""
MISTAKES = """
import c_python_backend_utils
import triton_python_backend_utils as pb_utils

pb_utils.Tensor("X", [1, 2])
pb_utils.Tenser
number: int = c_python_backend_utils.TritonError("text").message()
"""

# The user's program uses everything that the documents show of native models and of the runtime.
PROGRAM = """
import asyncio
from typing import Annotated, TypedDict

import numpy as np
from numpy.typing import NDArray

import moonpool
import moonpool.testing
from moonpool import Batch, Bytes, Float32, Int64


class Sums(TypedDict):
    SUM: Float32[Batch, 4]
    COUNT: Int64[Batch, 1]


class Adds:
    max_batch_size = 16

    def __init__(self, config: dict[str, object]) -> None:
        self.config = config

    def __call__(
        self,
        A: Float32[Batch, 4],
        B: Float32[Batch, -1] | None = None,
        TEXT: Bytes[Batch, :] | None = None,
        ONE: Annotated[NDArray[np.float32], Batch] | None = None,
        IMAGE: Annotated[NDArray[np.uint8], 3, 224, 224] | None = None,
    ) -> Sums:
        return {"SUM": A if B is None else A + B, "COUNT": np.ones((len(A), 1), np.int64)}


class Doubles:
    def __call__(self, X: Float32[Batch, "width"]) -> Float32[Batch, "width"]:
        return X * 2


async def ask(runtime: moonpool.Runtime, x: NDArray[np.float32]) -> float:
    outputs = await runtime.ainfer("adds", {"A": x}, timeout_s=1.0)
    return float(outputs["SUM"].sum())


def main() -> None:
    x = np.ones((1, 4), np.float32)
    options = {"MOONPOOL_MEMORY_LIMIT_BYTES": "1G", "MOONPOOL_THREADS": "2"}
    with moonpool.Runtime(
        "models/",
        listener=moonpool.Progress(),
        sandbox="strict",
        sandbox_grants=["adds:MOONPOOL_SANDBOX_PATHS=/data"],
        model_options={"*": {"MOONPOOL_SCRATCH_BYTES": "1M"}, "adds": {"MOONPOOL_THREADS": 2}},
    ) as runtime:
        runtime.load("doubles", Doubles, instances=2)
        runtime.load("adds", options=options, parameters={"color": "red"}, sandbox="standard")
        try:
            print(runtime.submit("adds", {"A": x}).result().outputs["SUM"])
            for response in runtime.stream("adds", {"A": x}):
                print(response.outputs, response.parameters)
            placed = runtime.empty("adds", "A", (1, 4))
            placed[:] = x
            print(asyncio.run(ask(runtime, placed)), runtime.statistics("adds"))
        except moonpool.ModelError as error:
            print(error.code)
        except (moonpool.QueueFull, moonpool.RequestTimedOut, moonpool.MoonpoolError) as error:
            print(error.code)
    with moonpool.testing.load("models/adds") as model:
        print(model.infer({"A": x}))


if __name__ == "__main__":
    main()
"""
# Each line has a mistake.
WRONG_PROGRAM = """
import moonpool
runtime = moonpool.Runtime(repositories="models/")
runtime.infer("adds", {}, timeout="1")
moonpool.Bach
"""


def test_every_name_of_the_module_is_known_to_type_checkers() -> None:
    for name in STUBS:
        text = (SOURCE / name / "__init__.pyi").read_text()

        # The star imports what `__all__` lists, so there is no second list that could become stale.
        assert text.splitlines()[-1] == "from moonpool.stub.pb_utils import *"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has moonpool installed, as a wheel would, and what this one has."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    for name in ["moonpool", *STUBS]:
        os.symlink(SOURCE / name, Path(packages) / name)
    Path(packages, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


def mypy(python: str, folder: Path, *texts: str) -> list[str]:
    files = [f"model{number}.py" for number in range(len(texts))]
    for name, text in zip(files, texts, strict=True):
        (folder / name).write_text(text)
    (folder / "mypy.ini").write_text("[mypy]\n")
    # All tests share a cache of what mypy has read of libraries.
    cache = Path(python).parents[1] / ".mypy_cache"
    options = ["--strict", "--python-executable", python, "--cache-dir", str(cache)]
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *files],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    return (ended.stdout + ended.stderr).splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="mypy is not installed")
def test_a_model_is_type_checked(python: str, tmp_path: Path) -> None:
    accepted = ["Success: no issues found in 2 source files"]

    assert mypy(python, tmp_path, MODEL, ASKER) == accepted
    *mistakes, _ = mypy(python, tmp_path, MISTAKES)
    assert [line.rsplit("[", 1)[1] for line in mistakes if "error:" in line] == [
        "arg-type]",
        "attr-defined]",
        "assignment]",
    ]


def pyright(python: str, folder: Path, *, strict: bool) -> list[str]:
    """The errors in the files of a folder, each as `FILE:LINE RULE: TEXT`."""
    program = PYRIGHT if PYRIGHT.exists() else shutil.which("basedpyright")
    if program is None:
        pytest.skip("no pyright: `bash .ci/run pyright` installs it")
    mode = "strict" if strict else "standard"
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": mode}))
    ended = subprocess.run(
        [program, "--pythonpath", python, "--outputjson", "--threads", "1"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    found = json.loads(ended.stdout)
    assert found["summary"]["filesAnalyzed"] > 0
    return [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1} {each.get('rule', '')}: {each['message']}"
        for each in found["generalDiagnostics"]
        if each["severity"] == "error"
    ]


def readme() -> tuple[str, str, str]:
    """The examples of the README: the model, the program, and the one that hosts what it does not trust."""
    page = ROOT / "README.md"
    if not page.exists():
        pytest.skip("the documents are not here")
    text = page.read_text(encoding="utf-8")
    model, program, hosts = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return model, program, hosts


@pytest.mark.promise(
    "The package",
    "mypy and pyright, both at their strictest, accept a user's program, its models with hints "
    "and the README's example, and find mistakes in the use of moonpool.",
)
@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="mypy is not installed")
def test_mypy_accepts_a_user_s_program_and_the_examples_of_the_readme(python: str, tmp_path: Path) -> None:
    accepted = ["Success: no issues found in 4 source files"]

    assert mypy(python, tmp_path, PROGRAM, *readme()) == accepted
    *mistakes, _ = mypy(python, tmp_path, WRONG_PROGRAM)
    assert [line.split(":")[1] for line in mistakes if "error:" in line] == ["3", "4", "5"]


def hints_of(page: str, head: str, cell: int) -> list[str]:
    """The hints in one column of the table that begins with `head`."""
    table = page.partition(f"{head}\n")[2].partition("\n\n")[0]
    cells = [re.split(r" (?<!\\)\| ", row.strip("| "))[cell] for row in table.splitlines()[1:]]
    return [hint.replace("\\|", "|") for each in cells for hint in re.findall(r"`(.+?)`", each)]


HINTED = """
from typing import Annotated, TypedDict
import numpy
from numpy.typing import NDArray
from moonpool import Batch, Float32, Outputs, Ragged
class Sums(TypedDict):
    SUM: Float32[Batch, 4]
"""


def hinted(hints: list[str]) -> str:
    """A program in which each line has one of the hints."""
    lines: list[str] = []
    for hint in hints:
        given = f"({hint if ':' in hint.partition('[')[0] else f'X: {hint}'}) -> None"
        head = f"(){hint}" if hint.startswith("->") else given
        lines.append(f"def f{len(lines)}{head}: raise NotImplementedError")
    return HINTED + "\n".join(lines)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="mypy is not installed")
def test_the_page_says_which_hints_mypy_refuses_and_what_to_write_for_them(python: str, tmp_path: Path) -> None:
    path = ROOT / "docs" / "NATIVE_MODELS.md"
    if not path.exists():
        pytest.skip("the documents are not here")
    page = path.read_text(encoding="utf-8")
    refused = hints_of(page, "| refused | write |", 0)
    written = [hint for hint in hints_of(page, "| refused | write |", 1) if hint != "TypedDict"]
    others = [hint for hint in hints_of(page, "| Hint | Meaning |", 0) if hint not in refused]
    shown = mypy(python, tmp_path, hinted(others + written), hinted(refused))

    assert "Float32[()]" in refused
    assert "Float32[Batch, 4]" in others
    assert "-> Sums" in written
    assert [line for line in shown if line.startswith("model0.py") and ": error: " in line] == []
    complained = {int(line.split(":")[1]) for line in shown if ": error: " in line}
    begin = HINTED.count("\n") + 1
    assert complained == set(range(begin, begin + len(refused)))


@pytest.mark.promise("The package", "mypy and pyright, both at their …")
@pytest.mark.slow
def test_pyright_accepts_a_user_s_program_and_the_examples_of_the_readme(python: str, tmp_path: Path) -> None:
    names = ("program.py", "scale.py", "use.py", "hosts.py")
    for name, text in zip(names, (PROGRAM, *readme()), strict=True):
        (tmp_path / name).write_text(text)
    assert pyright(python, tmp_path, strict=True) == []

    for name in names:
        (tmp_path / name).unlink()
    # The model gives its list of responses no type, as people write it.
    (tmp_path / "triton_model.py").write_text(MODEL)
    (tmp_path / "program.py").write_text(WRONG_PROGRAM)
    mistakes = pyright(python, tmp_path, strict=False)
    assert [mistake.split()[0] for mistake in mistakes] == [f"program.py:{line}" for line in (3, 4, 5)]


@pytest.mark.promise(
    "The package",
    "`moonpool.__all__` lists the names in the order of their use, with the hints; the other "
    "public names are exported for type checkers, too.",
)
def test_the_names_of_the_package_are_in_order_of_use_and_have_the_hints() -> None:
    names = moonpool.__all__

    assert names[0] == "Runtime"
    assert names.index("Batch") < names.index("Float32") < names.index("MoonpoolError")
    assert set(hints.__all__) < set(names)
    assert all(hasattr(moonpool, name) for name in names)
    assert all(getattr(moonpool, name) is not None for name in moonpool.errors.__all__)


@pytest.mark.promise("The package", "`help(moonpool)` begins with lines that work …")
def test_help_begins_with_use_and_fits_what_a_person_reads() -> None:
    lines = pydoc.plain(pydoc.render_doc(moonpool)).splitlines()
    first = lines[: next(place for place, line in enumerate(lines) if "CONTENTS" in line)]

    assert len(first) < 30
    assert any("runtime.infer(" in line for line in first)
    assert len(lines) < 600


@pytest.mark.promise(
    "The package", "`help(moonpool)` begins with lines that work when they are pasted, and is short enough to read."
)
def test_the_lines_of_use_in_the_help_work(tmp_path: Path) -> None:
    text = (moonpool.__doc__ or "").split("\n\n`Runtime", 1)[0]
    model, program = re.split(r"\n *# a program beside it\n", text.split("# scale.py\n", 1)[1])
    (tmp_path / "scale.py").write_text(re.sub("^    ", "", model, flags=re.MULTILINE))
    program = re.sub("^    ", "", program, flags=re.MULTILINE)
    (tmp_path / "use.py").write_text(f"import moonpool\nimport numpy as np\n{program}\n")

    ended = subprocess.run(
        [sys.executable, "use.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.stdout, ended.stderr) == ("[[2. 2. 2.]\n [2. 2. 2.]]\n", "")
