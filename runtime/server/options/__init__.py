"""The options of `moonpool serve`: their table, their sources, and the options of the protocols that follow from
them.
"""
