"""Batches, recipes, the loop, and many trials as one stacked network. Nothing here knows a metric's name."""
