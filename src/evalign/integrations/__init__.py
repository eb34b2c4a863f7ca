"""Integrations with other frameworks, one module each."""
