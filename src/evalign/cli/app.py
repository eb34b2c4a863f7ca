"""The `evalign` command: registers the commands and turns wrong input into one line and exit code 2."""

import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Annotated, NoReturn

import typer

from evalign.cli import bench, compare, demo, fit, predict
from evalign.cli.console import EXIT_INTERRUPTED, until_pipe_closes
from evalign.storage.atomic import DISK_FULL

EXIT_WRONG_INPUT, EXIT_BUG = 2, 1
PAPER_COMMANDS = ("datasets", "reproduce")
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
TRACEBACK = "EVALIGN_TRACEBACK"

app = typer.Typer(
    name="evalign",
    help="Train classifiers for the metric they are judged by, and compare them with baselines.",
    epilog="Start with: evalign demo",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (demo, fit, predict, compare, bench):
    app.command(module.NAME, epilog=f"Example: {module.EXAMPLE}")(module.command)


def _add_commands_of_papers() -> None:
    """Add the commands that `evalign-papers` registers, or stubs that say what to install."""
    found = {point.name: point for point in entry_points(group="evalign.commands")}
    for name in PAPER_COMMANDS:
        if name in found:
            module = found[name].load()
            app.command(name, epilog=f"Example: {module.EXAMPLE}")(module.command)
        else:
            app.command(name, hidden=True, context_settings=ANY_ARGUMENTS)(_missing)


def _missing(context: typer.Context) -> None:
    raise ValueError(f"`evalign {context.info_name}` is part of evalign-papers; install it: pip install evalign-papers")


_add_commands_of_papers()


def _show_version(wanted: bool) -> None:
    if wanted:
        from evalign import __version__

        typer.echo(f"evalign {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 2 wrong input, 3 a constraint that cannot be met, 130 Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process may have closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for encodings that cannot represent a character
    # Read by torch's thread pool on import. Threads that spin while waiting slow a fit from seconds to minutes on a
    # busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where the home folder is read-only
    try:
        # The arguments travel as the context's `obj`: result.json records how to repeat the run.
        with until_pipe_closes():
            code = app(args=given, prog_name="evalign", standalone_mode=False, obj=given)
        if code == EXIT_INTERRUPTED:  # typer's translation of a KeyboardInterrupt
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", EXIT_INTERRUPTED)
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        _explain(error)
    raise SystemExit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> NoReturn:
    # Typer's own errors, recognised by this method: their classes have moved between versions.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        where = "evalign" if context is None else context.command_path
        _fail(f"{error.format_message().rstrip('.')}; see {where} --help", EXIT_WRONG_INPUT)
    if isinstance(error, ModuleNotFoundError):
        _fail(f"this needs {error.name}, which is not installed; pip install 'evalign[cli]'", EXIT_WRONG_INPUT)
    if isinstance(error, MemoryError):
        _fail("the table does not fit in memory; drop columns, or take a sample of its rows", EXIT_WRONG_INPUT)
    if isinstance(error, OSError) and error.filename is not None:
        _fail(f"{error.filename} cannot be used ({error.strerror}); check the path", EXIT_WRONG_INPUT)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        _fail(f"standard output cannot be written ({error.strerror}); redirect it elsewhere", EXIT_WRONG_INPUT)
    # Raised by checks, ours or scikit-learn's; a diverging loss is a FloatingPointError with advice.
    if isinstance(error, OSError) or (isinstance(error, ValueError | FloatingPointError) and _is_checked(error)):
        _fail(str(error), EXIT_WRONG_INPUT)
    kind = type(error).__name__
    _fail(f"this is a bug ({kind}: {error}); run again with {TRACEBACK}=1 to see where", EXIT_BUG)


def _is_checked(error: Exception) -> bool:
    """Whether one of our checks raised this; a ValueError from inside numpy is a bug, not wrong input."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.split(".")[0] in ("evalign", "evalign_papers", "sklearn")


def _fail(message: str, code: int) -> NoReturn:
    # Not through rich, which would wrap the line at the width of the terminal.
    print(f"evalign: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)
