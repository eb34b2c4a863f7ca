"""Slow forms, written from the papers' definitions and independently of the package."""
