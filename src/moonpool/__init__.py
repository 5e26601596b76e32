"""Models served from sealed processes, over shared memory."""

from moonpool.runtime.runtime import Runtime

__all__ = ["Runtime"]
