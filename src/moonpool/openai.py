"""Names the requests and the pieces of models that speak OpenAI's API. docs/OPENAI.md shows their use."""

from moonpool.stub.openai import BadRequest as BadRequest
from moonpool.stub.openai import ChatRequest as ChatRequest
from moonpool.stub.openai import CompletionRequest as CompletionRequest
from moonpool.stub.openai import Delta as Delta
from moonpool.stub.openai import OpenAIRequest as OpenAIRequest
from moonpool.stub.openai import RerankRequest as RerankRequest
from moonpool.stub.openai import Segment as Segment
from moonpool.stub.openai import TranscriptionRequest as TranscriptionRequest
from moonpool.stub.openai import Usage as Usage
from moonpool.stub.openai import tool_call as tool_call
