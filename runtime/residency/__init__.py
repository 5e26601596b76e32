"""Puts models to sleep that nobody uses or that others need the memory of, and wakes them when they are asked for."""
