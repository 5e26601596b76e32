"""A client of KServe v2 over HTTP and gRPC: addresses, requests, and everything that is asked once."""
