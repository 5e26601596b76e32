"""The budgets of a stub: limits on what it may send, ask for and leave unread.

The runtime reads them here. The library in a tritonserver has them in `ipc/native/wire.h`, which is generated from this
module.
"""

from __future__ import annotations

from moonpool.ipc.messages import Kind

# Messages on the control and the calls channel together: more than a model in Python needs. A long message counts as
# several. Of one that lies in memory, the beginning counts twice, because it is read before the rest.
MESSAGES_PER_S = 20_000
MESSAGE_BYTES = 512
# The runtime does not read the channels of a stub that is over budget for at least so long.
PAUSE_MS = 20
# Another region takes a thread and memory. An honest stub asks seldom, since each region is larger than the last.
_GROWTH_COST = 100
# A load, an unload or a question for readiness may take a thread.
_TASK_COST = 20
# A call of another model that the port reads, and that the model takes, costs the reactor that much less than a
# message that Python reads and checks, and no stub sends more of them than are answered.
USUAL_CALL_COST = 0.25
# These messages count as so many others.
COSTS: dict[int, int] = {
    Kind.GROW: _GROWTH_COST,
    Kind.LOAD_MODEL: _TASK_COST,
    Kind.UNLOAD_MODEL: _TASK_COST,
    Kind.IS_MODEL_READY: _TASK_COST,
}
# So many observations of metrics count as a message: in a tritonserver, each of them is a call of the server.
OBSERVATIONS_PER_MESSAGE = 100
# The most families and metrics, together, that one stub may hold, and the most characters that they may take in the
# exposition. A line and a label each count so many characters more than their text has.
MAX_METRICS = 10_000
METRICS_CHARACTERS = 16 << 20
METRIC_PART_CHARACTERS = 64
# The same for all instances of a model, whose metrics lie in the runtime. Where they lie in a tritonserver, only each
# stub has a limit.
MODEL_METRICS_CHARACTERS = 4 * METRICS_CHARACTERS
# A line that a model logs counts as several if it is longer.
LOG_LINE_BYTES = 8192

# Loads of models that one stub may have in progress.
MAX_TASKS = 64
# The copies of open requests to other models that were too large for a packet. One may be larger, but only alone.
COPIED_BYTES = 64 << 20
# The copies of loads in progress; in a tritonserver also the strings in open requests. A configuration counts so many
# times beside its own copy: parsed JSON takes that much memory.
COPIED_LOADS_BYTES = 1 << 30
JSON_FACTOR = 20

# The memory by which a stub has grown is given up when it was not used for so long. The first region of it is kept
# longer, as the next large tensor needs it again, and new memory takes several times as long as the copy.
KEEP_MS = 5_000
KEEP_FIRST_MS = 60_000

# Answers that a stub may leave unread. Its model asked for all of them, but may have no time to look.
UNREAD_BYTES = 64 << 20
# What it takes to remember an answer, beside its own bytes: most are short.
UNREAD_ANSWER_BYTES = 64
# The longest text of an error that a model gets.
LONGEST_ERROR = 65_536
# Once so many blocks of answers are free, the stub gets a message about them.
RELEASE_AT = 64
# The longest text of an error that fits a packet whatever its characters are, so that there is always room for it.
SHORT_MESSAGE = 7000
