"""The parent: lifecycle of backends, models and instances, scheduling, and the ways in."""
