"""The process behind `moonpool serve`: its options, its log, its beginning and its end."""
