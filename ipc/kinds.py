"""Who sends, and what for: the numbers of the wire. Imported from `ipc.messages`, where the tables are."""

from __future__ import annotations

from enum import IntEnum


class Side(IntEnum):
    """Who sends."""

    RUNTIME = 1
    STUB = 2


class Kind(IntEnum):
    """What a message is for. The numbers are the wire's; they are never used again for another kind."""

    # Work channel.
    START = 1
    COMPLETED = 2
    LOADED = 3
    FAILED = 4
    EXECUTE = 5
    ANSWER = 6
    FINALIZE = 7
    FINALIZED = 8
    CONFINED = 10
    # Any channel: stands for a message that is too large for a packet and lies in memory.
    INDIRECT = 9
    # Control channel.
    SANDBOX = 15
    REGION = 16
    GROW = 17
    REFUSED = 18
    RELEASE = 19
    RETIRE = 20
    LOG = 21
    RESPONSES = 22
    CANCEL = 23
    METRICS = 24
    LOGGING = 25
    READY = 26
    READINESS = 27
    PEER = 28
    BEGUN = 29
    LENT_REGION = 40
    EVENT = 48
    # Calls channel.
    INFER = 30
    REPLY = 31
    WITHDRAW = 32
    LET_GO = 33
    LOAD_MODEL = 34
    UNLOAD_MODEL = 35
    IS_MODEL_READY = 36
    DONE = 37
    NEW_METRIC = 38
    METRIC_VALUE = 39
    CANCEL_CALL = 43
    # Control channel of a template.
    FORK = 45
    REAP = 46
    EXITED = 47
