"""Models served from sealed processes, over shared memory."""
