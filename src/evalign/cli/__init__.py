"""The `evalign` command: one module per command; torch and pandas are imported only when a command runs."""
