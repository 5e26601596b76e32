"""Measures models and servers: the load generator, hosts to compare with, and searches for settings."""
