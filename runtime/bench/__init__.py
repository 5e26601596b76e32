"""A load generator for servers that speak the KServe v2 protocol, and what its measurements are made of."""
