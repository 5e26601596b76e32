"""Answers what a model asks for: the hosts of a model in a stub and in its forks, and the calls channel to the
runtime.
"""
