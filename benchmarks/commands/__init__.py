"""The commands `bench` and `tune`: their options, and what they print and write."""
