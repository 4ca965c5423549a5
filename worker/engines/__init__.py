"""Engines that a worker can run, one folder each."""
