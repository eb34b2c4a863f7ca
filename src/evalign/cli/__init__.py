"""The `evalign` command: one command a file, torch and pandas imported only by a command that runs."""
