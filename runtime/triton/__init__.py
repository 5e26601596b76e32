"""moonpool as a backend of Triton: the process beside tritonserver that starts the stubs, and the library inside."""
