"""Runs the Python that it is given, as the tool of an agent does, or asks the agent to run it.

The code is a stranger's. It runs in this process, which `config.pbtxt` puts into the sandbox `strict`, gives a few
seconds, and replaces after each request.
"""

import contextlib
import io
import re

from moonpool.openai import ChatRequest, Delta, tool_call


class Calculator:
    def chat(self, request: ChatRequest):
        last = request.messages[-1]
        if last["role"] == "tool":
            yield f"The result is {last['content']}."
            return
        code = snippet_in(last["content"])
        if any(tool["function"]["name"] == "python" for tool in request.tools):
            yield Delta(tool_calls=[tool_call("python", {"code": code})])
        else:
            yield run(code)


def snippet_in(text: str) -> str:
    """Return the code between ``` and ```, or a program that prints the whole text's value."""
    found = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return found[1] if found else f"print({text})"


def run(code: str) -> str:
    """Return what the code prints, or its error."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__"})
    except Exception as error:
        return f"{printed.getvalue()}{type(error).__name__}: {error}"
    return printed.getvalue().strip()
