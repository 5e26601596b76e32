"""The search for the settings of a model with which a server answers most within limits of latency."""
