"""Experiment engine: a frozen config per cell, `run(config) -> report`, and a scheduler for many cells."""
