"""Clients that people use, unchanged, against a server: each test is a program of theirs in their own environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.running import RunningServer, running

MODELS = Path(__file__).parents[2] / "models"
# `bash .ci/run openai` fills it with openai-python, and `bash .ci/run frameworks` with the others.
ENVIRONMENT = Path(__file__).parents[3] / ".venv-openai"
# Their packages take minutes to compile on a busy machine, the first time.
pytestmark = pytest.mark.timeout(400)
# The package of each program.
PACKAGES = {"LangChain": "langchain_openai", "LlamaIndex": "llama_index", "litellm": "litellm"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("openai") / "models"
    for name in ("writer", "scribe"):
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text((MODELS / f"{name}.py").read_text())
    with running(folder) as found:
        yield found


PROGRAMS = {
    "openai, whole, stream and raw": """
        import openai
        client = openai.OpenAI(base_url=base, api_key="x")
        say = lambda text, **more: client.chat.completions.create(
            model="writer", messages=[{"role": "user", "content": text}], **more)
        whole = say("one two")
        assert whole.choices[0].message.content == "one two ", whole
        assert whole.choices[0].finish_reason == "stop"
        pieces = list(say("counts", stream=True, stream_options={"include_usage": True}))
        assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == "one two"
        assert pieces[-1].usage.total_tokens == 5
        raw = client.chat.completions.with_raw_response.create(
            model="writer", messages=[{"role": "user", "content": "x"}], extra_headers={"x-request-id": "mine"})
        assert raw.headers["x-request-id"] == "mine" and raw.parse()._request_id == "mine"
        call = say("calls", tools=[{"type": "function", "function": {"name": "weather"}}]).choices[0].message.tool_calls
        assert [c.function.name for c in call] == ["weather", "time"]
        vector = client.embeddings.create(model="writer", input=["abc", "x"]).data
        assert [list(each.embedding) for each in vector] == [[3, 2, 0.5, -1], [1, 2, 0.5, -1]]
        assert client.completions.create(model="writer", prompt="a").choices[0].text == "a!"
        assert [m.id for m in client.models.list()] == ["scribe", "writer"]
        assert client.models.retrieve("writer").id == "writer"
    """,
    "openai, recordings": """
        import openai
        client = openai.OpenAI(base_url=base, api_key="x")
        file = ("a.wav", b"one two", "audio/wav")
        write = lambda **more: client.audio.transcriptions.create(model="scribe", file=file, **more)
        whole = write()
        assert (whole.text, whole.usage.total_tokens) == ("one two ", 3), whole
        assert write(response_format="text") == "one two \\n"
        assert write(response_format="vtt").startswith("WEBVTT")
        verbose = write(response_format="verbose_json", timestamp_granularities=["word"], temperature=0.2)
        assert (verbose.language, verbose.duration, verbose.segments[1].start) == ("en", 2, 1), verbose
        assert [each.word for each in verbose.words] == ["one", "two"]
        events = list(write(stream=True))
        assert "".join(each.delta for each in events[:-1]) == events[-1].text == "one two "
        try: write(prompt="untimed", response_format="srt")
        except openai.BadRequestError as error: assert error.param == "response_format"
    """,
    "openai, errors": """
        import openai
        client = openai.OpenAI(base_url=base, api_key="x", max_retries=2)
        def error(kind, act):
            try: act()
            except kind as error: return error
            raise SystemExit(f"no {kind.__name__}")
        say = lambda text, **more: client.chat.completions.create(
            model="writer", messages=[{"role": "user", "content": text}], **more)
        wrong = error(openai.UnprocessableEntityError, lambda: say("x", temperature=3))
        assert wrong.param == "temperature", wrong
        assert error(openai.BadRequestError, lambda: say("refuses")).code == "invalid_value"
        assert error(openai.InternalServerError, lambda: say("raises")).code == "model_error"
        assert error(openai.NotFoundError, lambda: client.models.retrieve("x")).code == "model_not_found"
        got = []
        def read():
            for piece in say("breaks", stream=True): got.append(piece)
        assert "no idea" in str(error(openai.APIError, read))
        assert [p.choices[0].delta.content for p in got] == ["", "half"]
    """,
    "openai, async": """
        import asyncio, openai
        async def main():
            client = openai.AsyncOpenAI(base_url=base, api_key="x")
            stream = await client.chat.completions.create(
                model="writer", messages=[{"role": "user", "content": "a b"}], stream=True)
            assert "".join([p.choices[0].delta.content or "" async for p in stream]) == "a b "
            async with client.chat.completions.stream(
                model="writer", messages=[{"role": "user", "content": "a b"}]) as stream:
                assert (await stream.get_final_completion()).choices[0].message.content == "a b "
            await client.close()
        asyncio.run(main())
    """,
    "LangChain": """
        from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
        chat = ChatOpenAI(model="writer", base_url=base, api_key="x", stream_usage=True)
        assert chat.invoke("one two").content == "one two "
        assert "".join(piece.content for piece in chat.stream("one two")) == "one two "
        assert chat.invoke("counts").usage_metadata["total_tokens"] == 5
        parameters = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": "weather", "description": "", "parameters": parameters}}
        calls = chat.bind_tools([tool]).invoke("calls").tool_calls
        assert calls[0]["args"] == {"city": "Bern"}, calls
        assert OpenAI(model="writer", base_url=base, api_key="x").invoke("a") == "a!"
        vectors = OpenAIEmbeddings(model="writer", base_url=base, api_key="x", check_embedding_ctx_length=False)
        assert vectors.embed_documents(["abc"]) == [[3, 1, 0.5, -1]]
    """,
    "LlamaIndex": """
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike
        chat = OpenAILike(model="writer", api_base=base, api_key="x", is_chat_model=True)
        asked = [ChatMessage(role="user", content="one two")]
        assert chat.chat(asked).message.content == "one two "
        assert [piece.delta for piece in chat.stream_chat(asked)][-1] is not None
        plain = OpenAILike(model="writer", api_base=base, api_key="x", is_chat_model=False)
        assert plain.complete("a").text == "a!"
    """,
    "litellm": """
        import litellm
        asked = [{"role": "user", "content": "one two"}]
        for provider in ("openai", "hosted_vllm"):
            how = dict(model=f"{provider}/writer", messages=asked, api_base=base, api_key="x")
            assert litellm.completion(**how).choices[0].message.content == "one two "
            pieces = litellm.completion(**how, stream=True)
            assert "".join(p.choices[0].delta.content or "" for p in pieces) == "one two "
        found = litellm.embedding(model="openai/writer", input=["abc"], api_base=base, api_key="x")
        assert found.data[0]["embedding"] == [3, 1, 0.5, -1]
        ranked = litellm.rerank(
            model="hosted_vllm/writer", query="a", documents=["x", "a a"], api_base=base, api_key="x")
        assert ranked.results[0]["index"] == 1
    """,
}


@pytest.mark.promise("OpenAI", "openai-python, LangChain, LlamaIndex and litellm work unchanged.")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_client_works_unchanged(server: RunningServer, name: str) -> None:
    package = PACKAGES.get(name, "openai")
    if not list(ENVIRONMENT.glob(f"lib/python3*/site-packages/{package}")):
        pytest.skip(f"{ENVIRONMENT.name} has no {package}")
    program = f"base = 'http://{server.http}/v1'\n" + "\n".join(line[8:] for line in PROGRAMS[name].splitlines())
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / "python"), "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        # Their own settings, and nothing that they would fetch or tell.
        env={"PATH": os.environ["PATH"], "HOME": str(server.log.parent), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        check=False,
    )

    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
