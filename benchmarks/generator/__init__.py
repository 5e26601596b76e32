"""The load generator's processes: prepared requests, HTTP/1.1 and HTTP/2, and the times of answers."""
