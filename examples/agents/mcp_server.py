"""Gives the clients of an MCP server a tool that runs Python in a moonpool sandbox.

    {"mcpServers": {"python": {"command": "python", "args": ["examples/agents/mcp_server.py"]}}}

Each client starts a server of its own, and has one namespace and one folder there until it leaves. Tried with the
package `mcp` 2.3.
"""

from __future__ import annotations

from typing import Any

from mcp.server.mcpserver import MCPServer

import moonpool

server = MCPServer("python", instructions="Runs Python in a sandbox without a network. Variables stay between calls.")
box = moonpool.Sandbox(timeout_s=30, memory="1G", files_bytes="64M")


@server.tool()
async def run_python(source: str, files: dict[str, str] | None = None) -> dict[str, Any]:
    """Run Python, and return its output and the value of the last expression.

    numpy can be imported. `files` are texts by name, for the working directory. What the source writes below out/ comes
    back. If `state_lost` is true, the variables of earlier calls are gone.
    """
    done = await box.arun(source, files=files or {})
    return {
        "value": done.value if done.is_repr or done.value is None else repr(done.value),
        "stdout": done.stdout,
        "stderr": done.stderr,
        "error": None if done.error is None else (done.error.traceback or str(done.error)),
        "limit": "" if done.error is None else done.error.limit,
        "files": {name: content.decode("utf-8", "backslashreplace") for name, content in done.files.items()},
        "state_lost": done.state_lost,
    }


if __name__ == "__main__":
    with box:
        server.run()
