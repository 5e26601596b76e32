"""Yields as many pieces as the client wants; then it ends, or waits for ever, or goes on as fast as it can."""

import asyncio


class Chat:
    async def chat(self, request):
        for _ in range(request.max_tokens):
            yield "piece "
        if request.user == "waits":
            await asyncio.Event().wait()
        while request.user == "floods":
            yield "x" * 10_000
            await asyncio.sleep(0)
