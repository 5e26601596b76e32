"""Runs Triton's own tests of its OpenAI front end against `moonpool serve`, out of a checkout of its server repository.

    python tests/triton/openai/suite.py PYTHON CHECKOUT FOLDER

PYTHON is an interpreter with the packages of the suite. The tests are copied into FOLDER, with `seams.py` in the place
of their `utils.py` and our models in the place of those that need a GPU, and the result is a table there.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL = "llama-3.1-8b-instruct"
# What the suite asks of Triton's own classes and of what a model does, by the reason why it says nothing about
# `moonpool serve`.
NOT_AIMED = {
    "LoRA of vLLM's and TensorRT-LLM's backends": (
        "test_lora::test_parse_lora_configs",
        "test_lora::test_validate_lora_path_trtllm",
        "test_lora::LoRATest::test_lora_separator_not_set",
        "test_lora::LoRATest::test_lora_separator_set",
        "test_lora::LoRATest::test_lora_separator_set_for_lora_off_model",
        "test_lora::LoRATest::test_lora_separator_set_for_non_vllm_formatted_models",
    ),
    "classes of the front end": (
        "test_openai_restricted_apis::test_restricted_feature_summary_omits_header_values",
        "test_openai_restricted_apis::test_startup_log_does_not_leak_restriction_header_values",
        "test_request_size::TestContentLengthValidation::test_non_integer_content_length_rejected_with_400",
        "test_request_size::TestContentLengthValidation::test_negative_content_length_rejected_with_400",
    ),
    "a limit of the front end's parser of calls": (
        "test_tool_calling::TestStreamingToolParseLimit::test_truncated_when_tool_call_exceeds_limit",
        "test_tool_calling::TestStreamingToolParseLimit::test_not_truncated_within_limit",
        "test_tool_calling::TestStreamingToolParseLimit::test_limit_ignored_without_tools",
    ),
    "a tokenizer of the Hub without a template": (
        "test_chat_completions::TestChatCompletionsTokenizers::test_chat_completions_invalid_chat_tokenizer",
    ),
}
_RANKS = ("failed", "passed", "skipped")


def main() -> int:
    python, checkout, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    tests = folder / "tests"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkout / "python" / "openai", folder)
    shutil.copy(HERE / "seams.py", tests / "utils.py")
    # Otherwise pytest would take the settings of our own tests.
    (folder / "pytest.ini").write_text("[pytest]\n")
    for repository in (HERE / "repositories").iterdir():
        shutil.rmtree(tests / repository.name, ignore_errors=True)
        shutil.copytree(repository, tests / repository.name)
    embedder = tests / "vllm_embedding_models" / "all-MiniLM-L6-v2" / "1" / "expected.json"
    embedder.write_text(json.dumps(_expected(tests / "test_embeddings.py")))
    calling = tests / "test_tool_calling.py"
    first = _run(python, folder, "most", [f"--ignore={calling}"], tests / "vllm_models")
    second = _run(python, folder, "calls", [str(calling)], tests / "vllm_tool_models")
    results = _results(folder / "most.xml") | _results(folder / "calls.xml")
    text = _table(results)
    (folder / "results.md").write_text(text)
    print(text)  # noqa: T201
    return first or second


def _expected(module: Path) -> list[float]:
    """Return the embedding that the suite expects."""
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EMBEDDING_OUTPUT_FLOAT":
            found: list[float] = ast.literal_eval(node.value)
            return found
    raise SystemExit(f"{module} has no EMBEDDING_OUTPUT_FLOAT")


def _run(python: str, folder: Path, name: str, arguments: list[str], repository: Path) -> int:
    left_out = [f"--deselect=tests/{each.replace('::', '.py::', 1)}" for group in NOT_AIMED.values() for each in group]
    environment = {
        **os.environ,
        "MOONPOOL_TOKENIZER": str(HERE / "tokenizer"),
        "PATH": f"{HERE / 'stand_in' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{HERE / 'stand_in'}:{folder}",
        "TEST_BACKEND": "vllm",
        "TEST_MODEL": MODEL,
        "TEST_MODEL_REPOSITORY": str(repository),
    }
    options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={folder / name}.xml"]
    command = [python, "-m", "pytest", *options, *left_out, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def _results(report: Path) -> dict[str, str]:
    """Return the result of each function: that of its cases, of which a failure goes first."""
    found: dict[str, str] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        path = "::".join([*str(case.get("classname")).split(".")[1:], str(case.get("name")).partition("[")[0]])
        kinds = {child.tag for child in case}
        result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[path] = min(found.get(path, "skipped"), result, key=_RANKS.index)
    return found


def _table(results: dict[str, str]) -> str:
    lines = ["| file | functions that pass | skipped by the suite | fail |", "| --- | --- | --- | --- |"]
    files = sorted({name.partition("::")[0] for name in results})
    for file in files:
        counts = Counter(result for name, result in results.items() if name.startswith(f"{file}::"))
        lines.append(f"| `{file}.py` | {counts['passed']} | {counts['skipped']} | {counts['failed']} |")
    counts = Counter(results.values())
    lines.append(f"| all | {counts['passed']} | {counts['skipped']} | {counts['failed']} |")
    lines += ["", *(f"failed: {name}" for name, result in sorted(results.items()) if result == "failed")]
    left_out = sum(map(len, NOT_AIMED.values()))
    lines += [f"not aimed at: {left_out}", *(f"- {why}: {len(names)}" for why, names in NOT_AIMED.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
