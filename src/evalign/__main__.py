"""The `evalign` command, also as `python -m evalign`."""

import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        from evalign.cli.app import main as run
    except ModuleNotFoundError as error:
        wanted = f"the command line needs {error.name}, which is not installed; pip install 'evalign[cli]'"
        print(f"evalign: {wanted}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("evalign: interrupted; nothing was written", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
