"""Runs the code of a smolagents `CodeAgent` in a moonpool sandbox, on this machine, without a service or an image.

    with SandboxExecutor(memory="1G", timeout_s=60) as executor:
        CodeAgent(tools=[], model=model, executor=executor).run("How many primes are below 1000?")

Tools are copied into the sandbox by their source, as smolagents does it for its own remote executors. There they have
no network unless `options={"MOONPOOL_SANDBOX_PORTS": "443"}` grants it. Tried with smolagents 1.26.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from smolagents.local_python_executor import CodeOutput, PythonExecutor
from smolagents.tools import Tool, get_tools_definition_code

import moonpool

# An agent gives its last answer by a call of this tool.
_FINAL = """
class FinalAnswer(BaseException):
    pass

def final_answer(answer=None):
    global _final_answer
    _final_answer = answer
    raise FinalAnswer
"""


class SandboxExecutor(PythonExecutor):
    """Keeps variables from step to step. The options are those of `moonpool.Sandbox`."""

    def __init__(self, **options: Any) -> None:
        self._box = moonpool.Sandbox(**options)
        # What a new process needs again: the agent sends it once.
        self._tools = _FINAL
        self._variables: dict[str, Any] = {}

    def __enter__(self) -> SandboxExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """End the process. The agent calls it, too."""
        self._box.close()

    def send_tools(self, tools: dict[str, Tool]) -> None:
        own = {name: tool for name, tool in tools.items() if name != "final_answer"}
        self._tools = (get_tools_definition_code(own) if own else "") + _FINAL
        self._box.run(self._tools).unwrap()

    def send_variables(self, variables: Mapping[str, Any]) -> None:
        self._variables.update(variables)
        self._box.run("", self._variables).unwrap()

    def __call__(self, code_action: str) -> CodeOutput:
        done = self._box.run(code_action)
        lost = ""
        if done.state_lost:
            lost = "(All variables were lost, since the step before was ended.)\n"
            self._box.run(self._tools, self._variables).unwrap()
            done = self._box.run(code_action)
        logs = lost + done.stdout + done.stderr
        if done.error is None:
            return CodeOutput(output=done.value, logs=logs, is_final_answer=False)
        if done.error.type == "FinalAnswer":
            with contextlib.suppress(moonpool.SandboxError):
                return CodeOutput(self._box.run("_final_answer").unwrap(), logs, is_final_answer=True)
        raise RuntimeError(f"{logs}{done.error.traceback or done.error}")
