"""`python -m evalign` is `evalign`."""

from evalign.cli.app import main

if __name__ == "__main__":
    main()
