"""Hosts of models beside moonpool, each started in an environment of its own, so that one model is measured in all of
them.
"""
