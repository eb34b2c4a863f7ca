"""Configs of every table, written from its table.json and the papers' printed settings."""
