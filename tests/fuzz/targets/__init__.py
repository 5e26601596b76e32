"""Fuzz targets: the functions that read bytes from outside, each as a function of bytes that must not raise.

A target swallows the errors that are promised for bad bytes. Any other error is a finding.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.targets import archives, batches, bench, calls, clients, configurations, links, messages, openai, source

Target = Callable[[bytes], None]

TARGETS: dict[str, Target] = {
    "work": messages.work,
    "control": messages.control,
    "calls": messages.calls,
    "stored": messages.stored,
    "layout": messages.layout,
    "strings": messages.strings,
    "start": messages.start,
    "metrics": messages.metrics,
    "output": messages.output,
    "denials": messages.denials,
    "link": links.link,
    "execute": batches.execute,
    "call_dispatcher": calls.call_dispatcher,
    "http_infer": clients.http_infer,
    "http_generate": clients.http_generate,
    "http_json": clients.http_json,
    "grpc_wire": clients.grpc_wire,
    "grpc_infer": clients.grpc_infer,
    "openai_request": openai.openai_request,
    "openai_piece": openai.openai_piece,
    "chat_template": openai.chat_template,
    "shared_memory": clients.shared_memory,
    "pbtxt": configurations.pbtxt,
    "completed": configurations.completed,
    "archive": archives.archive,
    "source_answer": source.source_answer,
    "source_value": source.source_value,
    "bench_input_data": bench.input_data,
    "bench_npz": bench.npz,
    "bench_replay": bench.replay,
}
