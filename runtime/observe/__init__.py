"""Counts what it is given, and writes metrics in Prometheus' form."""
