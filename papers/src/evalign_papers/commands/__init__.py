"""Commands that this distribution adds to `evalign`."""
