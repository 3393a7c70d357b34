"""The subcommands, and how every error becomes one message and an exit status.

Torch is imported by the commands themselves, so that help and misspelt flags answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from ebbtide import __version__
from ebbtide.cli.bench import bench
from ebbtide.cli.demo import demo
from ebbtide.cli.doctor import doctor
from ebbtide.cli.plan import plan
from ebbtide.cli.report import report
from ebbtide.cli.settings import spelled_out
from ebbtide.cli.train import train
from ebbtide.errors import EbbtideError, EbbtideWarning, nearest

app = typer.Typer(
    name="ebbtide",
    help="Train transformer models larger than GPU memory, with the same numbers as if everything had fitted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ebbtide {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say the version, and end."),
    ] = False,
) -> None:
    pass


app.command()(train)
app.command()(plan)
app.add_typer(bench, name="bench")
app.command()(demo)
app.command()(doctor)
app.command()(report)

BAD_INPUT = 2
PACKAGE = Path(__file__).parents[1]
_as_python_does = warnings.formatwarning
INTERRUPTED, TERMINATED = 130, 143
NOT_SAVED = "what was trained since the last checkpoint, else since the start, is not saved"


class _Terminated(BaseException):
    """SIGTERM, as an exception: engines close, and leave no files on SSD."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def run(arguments: Sequence[str]) -> int:
    """The exit status: 0, or 2 with one message on standard error; a bug keeps its traceback."""
    arguments = spelled_out(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        status = get_command(app).main(arguments, prog_name="ebbtide", standalone_mode=False) or 0
        # typer makes an exit of Ctrl-C, and returns its status.
        return _interrupted() if status == INTERRUPTED else status
    except EbbtideError as error:
        return _refuse(str(error))
    except _Terminated:
        print(f"ebbtide: terminated; {NOT_SAVED}", file=sys.stderr)
        return TERMINATED
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted()
    except MemoryError:
        return _refuse("out of memory: the machine has no more; take a smaller size")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{where}{error.strerror or error}")
    except Exception as error:
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            line = str(error).strip().splitlines()[0]
            return _refuse(f"out of memory: {line}; take a smaller size")
        if not hasattr(error, "format_message"):  # what typer raises for a command line that it cannot read
            raise
        return _refuse(_usage(error, arguments))


def said_plainly(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """In place of `warnings.formatwarning`: our own warnings without a line of our code."""
    if issubclass(category, EbbtideWarning) or Path(filename).is_relative_to(PACKAGE):
        return f"ebbtide: {message}\n"
    return _as_python_does(message, category, filename, lineno, line)


def _usage(error: Any, arguments: Sequence[str]) -> str:
    context = getattr(error, "ctx", None)
    command = context.command if context is not None else get_command(app)
    option = getattr(error, "option_name", None)
    flags = [flag for parameter in command.params for flag in parameter.opts]
    if option is None and not error.format_message():
        message = f"a subcommand is missing: expected one of {', '.join(getattr(command, 'commands', {}))}"
    elif option is not None and option in arguments[-1:]:
        message = f"{option} needs a value"
    elif option is not None and option not in flags:
        message = f"unknown flag {option}{nearest(option, flags)}"
    else:
        message = error.format_message() + _found(error, arguments)
    return f"{message} (see `{context.command_path if context is not None else 'ebbtide'} --help`)"


def _found(error: Any, arguments: Sequence[str]) -> str:
    """The value that a flag could not take; typer names the flag only."""
    given = dict(pairwise(arguments))
    given |= {flag: value for flag, equals, value in (a.partition("=") for a in arguments) if equals}
    flags = getattr(getattr(error, "param", None), "opts", [])
    return "".join(f", found {given[flag]!r}" for flag in flags if flag in given)


def _interrupted() -> int:
    print(f"ebbtide: interrupted; {NOT_SAVED}", file=sys.stderr)
    return INTERRUPTED


def _refuse(message: str) -> int:
    rank = os.environ.get("RANK", "0")
    who = f"rank {rank}: " if rank != "0" else ""
    print(f"ebbtide: {who}{message}", file=sys.stderr)
    return BAD_INPUT
