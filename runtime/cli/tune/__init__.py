"""`moonpool tune`, the command."""
