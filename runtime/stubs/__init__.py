"""The runtime's end of a stub: process, channels, memory, answers and calls. Templates are here, too."""
