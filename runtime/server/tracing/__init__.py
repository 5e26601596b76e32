"""Records sampled requests: Triton's trace extension, into files or to OpenTelemetry."""
