"""The budgets of a stub: how much it may say, ask for and leave unread.

The runtime reads them here. The library in a tritonserver has them in `native/wire.h`, which is generated from this module.
"""

from __future__ import annotations

# On one channel: more than a model in Python needs. A long message counts as several.
MESSAGES_PER_S = 20_000
MESSAGE_BYTES = 512
# The shortest time for which a channel is not read after too much was said there.
PAUSE_MS = 20
# A request for another region counts as so many messages: it takes a thread and memory. An honest stub asks for ever larger
# ones, and so seldom.
GROWTH_COST = 100
# Loading a model, unloading it, and asking if it is ready count as so many.
TASK_COST = 20
# In a tritonserver, where each observation of a metric is a call of the server: how many of them count as a message.
OBSERVATIONS_PER_MESSAGE = 100
# A line that a model logs counts as several if it is longer.
LOG_LINE_BYTES = 8192

# Loads of models that one stub may have in progress.
MAX_TASKS = 64
# The copies of open requests to other models that were too large for a packet. One may be larger, but only alone.
COPIED_BYTES = 64 << 20
# The copies of loads in progress; in a tritonserver also the strings in open requests. A configuration counts so many
# times: parsed JSON takes that much memory.
COPIED_LOADS_BYTES = 1 << 30
JSON_FACTOR = 20

# Answers that a stub may leave unread. Its model asked for all of them, but may have no time to look.
UNREAD_BYTES = 64 << 20
# The longest text of an error that fits a packet whatever its characters are, so that there is always room for it.
SHORT_MESSAGE = 7000
