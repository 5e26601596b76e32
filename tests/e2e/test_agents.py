"""The examples for agents, with smolagents and with MCP's own client, in an environment that has both."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-agents"
PYTHON = ENVIRONMENT / "bin" / "python"
EXAMPLES = ROOT / "examples" / "agents"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="`bash .ci/run agents` installs smolagents and mcp")

STEPS = [
    "<code>x = numbers.sum()\nprint('sum', x)</code>",
    "<code>while True: pass</code>",
    "<code>x</code>",
    "<code>final_answer({'sum': float(numbers.sum()), 'double': doubled(4)})</code>",
]
AGENT = """
import json, sys
import numpy as np
from smolagents import CodeAgent, Model, tool
from smolagents.models import ChatMessage, MessageRole
from smolagents_executor import SandboxExecutor

class Scripted(Model):
    steps = iter(json.loads(sys.argv[1]))

    def generate(self, messages, **arguments):
        return ChatMessage(role=MessageRole.ASSISTANT, content="Thought: go on\\n" + next(self.steps))

@tool
def doubled(number: int) -> int:
    '''Doubles.

    Args:
        number: A number.
    '''
    return 2 * number

with SandboxExecutor(timeout_s=5, memory="500M") as executor:
    agent = CodeAgent(tools=[doubled], model=Scripted(), executor=executor, verbosity_level=0)
    answer = agent.run("Add up.", additional_args={"numbers": np.arange(5)})
    steps = [step for step in agent.memory.steps if hasattr(step, "observations")]
    print(json.dumps([answer, [str(step.observations) for step in steps], [str(step.error) for step in steps]]))
"""
CLIENT = """
import asyncio, json, os, sys
from mcp import Client, StdioServerParameters

async def main():
    server = StdioServerParameters(command=sys.executable, args=[sys.argv[1]], env=dict(os.environ))
    async with Client(server) as client:
        print(json.dumps([tool.name for tool in (await client.list_tools()).tools]))
        for source in ("x = 5; print(open('in').read())", "open('out/y', 'w').write(str(x)); x + 1", "1 / 0"):
            result = await client.call_tool("run_python", {"source": source, "files": {"in": "text"}})
            print(json.dumps(result.structured_content))

asyncio.run(main())
"""


def output_of(folder: Path, program: str, *arguments: str) -> list[str]:
    # A file, because smolagents reads the source of tools.
    (folder / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{EXAMPLES}"}
    command = [str(PYTHON), str(folder / "program.py"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=150)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_an_agent_of_smolagents_runs_its_steps_in_a_sandbox(tmp_path: Path) -> None:
    answer, observations, errors = json.loads(output_of(tmp_path, AGENT, json.dumps(STEPS))[-1])

    assert answer == {"sum": 10.0, "double": 8}
    assert "sum 10" in observations[0]
    assert "did not end within 5 s" in errors[1]
    assert "name 'x' is not defined" in errors[2]


def test_a_client_of_mcp_runs_python(tmp_path: Path) -> None:
    tools, first, second, third = map(json.loads, output_of(tmp_path, CLIENT, str(EXAMPLES / "mcp_server.py")))

    assert tools == ["run_python"]
    assert (first["stdout"], first["error"]) == ("text\n", None)
    assert (second["value"], second["files"]) == ("6", {"y": "5"})
    assert third["error"].endswith("ZeroDivisionError: division by zero\n")
