"""Runs somebody's source: a template that forks a process for each run, and what that process does."""
