"""The KServe v2 protocol over gRPC."""
