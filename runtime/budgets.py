"""How much a stub may say, ask for and leave unread: the numbers that both ends of a stub go by.

The runtime reads them here; the library in a tritonserver has them in `native/wire.h`, which is made of this module.
"""

from __future__ import annotations

# On one channel, more than a model in Python can have to say. What is long counts as several messages.
MESSAGES_PER_S = 20_000
MESSAGE_BYTES = 512
# How long a channel is not read at least after too much was said there.
PAUSE_MS = 20
# Messages that another region counts as: it takes a thread and memory, and an honest stub asks for ever more.
GROWTH_COST = 100
# The same of loading and unloading a model, and of asking whether one is ready.
TASK_COST = 20
# In a tritonserver, where each observation of a metric is a call of the server: how many of them count as a message.
OBSERVATIONS_PER_MESSAGE = 100
# Bytes of a line that a model logs that count as another line.
LOG_LINE_BYTES = 8192

# Loads of models that are on their way.
MAX_TASKS = 64
# Copies of requests to other models that were too large for a packet, until they are answered. One may be larger, but only alone.
COPIED_BYTES = 64 << 20
# The same of models that are to be loaded, of which the configuration counts so many times: JSON takes that much once it is
# read. In a tritonserver also of the strings in open requests.
COPIED_LOADS_BYTES = 1 << 30
JSON_FACTOR = 20

# What a stub may leave unread: its model asked for all of it, but need not have the time to look at it.
UNREAD_BYTES = 64 << 20
# Of a message of an error: what fits a packet, whatever it says, so that there is always room for it.
SHORT_MESSAGE = 7000
