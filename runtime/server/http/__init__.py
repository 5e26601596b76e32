"""KServe v2 over HTTP: connections of our own on httptools, inference without tasks, and a table of routes for the rest."""
