"""`moonpool bench`: its command line, the measurement, and what it prints and draws."""
