"""Calls tools itself: the one that the client names, or the first one if somebody asks for the weather."""

from moonpool.openai import ChatRequest, Delta, Usage, tool_call

ARGUMENTS = ('{"city": "Dallas", ', '"state": "TX", "unit": "fahrenheit"', "}")
DAYS = ', "num_days": 3}'


class Writer:
    async def chat(self, request: ChatRequest):
        last = request.messages[-1]
        choice = request.tool_choice
        if choice == "none" or last["role"] == "tool" or not request.tools:
            for word in ("It", "is", "warm."):
                yield word + " "
        else:
            tools = [tool["function"] for tool in request.tools]
            name = choice["function"]["name"] if isinstance(choice, dict) else tools[0]["name"]
            wants_days = any("num_days" in tool["parameters"]["properties"] for tool in tools if tool["name"] == name)
            parts = (*ARGUMENTS[:-1], DAYS if wants_days else ARGUMENTS[-1])
            yield Delta(tool_calls=[tool_call(name, call_id="call_123456789")])
            for part in parts:
                yield Delta(tool_calls=[tool_call(arguments=part)])
            if choice != "auto":
                yield Delta(finish_reason="stop")
        yield Usage(prompt_tokens=7, completion_tokens=5)
