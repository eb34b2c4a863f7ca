"""evalign in other people's frameworks, one file each."""
