"""The child: one process, one model instance."""
