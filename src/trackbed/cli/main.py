"""Entry point of the command line: `trackbed COMMAND ...`.

Every command parses its arguments, calls the library, and prints. Exit status: 0 on success; 1 on an error of the
library, with one line on stderr (for a blend file, one per problem); 2 on a usage error; 128 plus the signal number if
a signal ended the command.
"""

import errno
import signal
from itertools import chain
from types import FrameType
from typing import Any, Final, NoReturn

import click

from trackbed.cli.blend import blend
from trackbed.cli.build import build
from trackbed.cli.cache import cache
from trackbed.cli.ckpt import ckpt
from trackbed.cli.export import export
from trackbed.cli.finish import finish
from trackbed.cli.inspect import inspect
from trackbed.cli.merge import merge
from trackbed.cli.output import EXPECTED, accept_any_text, describe, describe_all
from trackbed.cli.preprocess import preprocess
from trackbed.cli.report import report
from trackbed.cli.seal import seal
from trackbed.cli.show import show
from trackbed.cli.train_tokenizer import train_tokenizer
from trackbed.cli.verify import verify
from trackbed.cli.where import where
from trackbed.daemon_threads import exit_at_once, exit_if_busy
from trackbed.version import __version__

_SECTIONS: Final = {
    "Token files (pairs of .bin and .idx)": (preprocess, train_tokenizer, merge, inspect, verify, seal, finish),
    "Blends and their indices": (blend, build, show, where, export, cache),
    "Checkpoints": (ckpt,),
    "Training runs": (report,),
}
"""Commands under the headings of `trackbed --help`, in order."""


_INTERRUPTED: Final = 128 + signal.SIGINT


class _CommandLine(click.Group):
    """Commands that are listed under headings, and print errors as one line on stderr."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands of each heading, with the first sentence of their help."""
        width = max(map(len, self.commands))
        for heading, commands in _SECTIONS.items():
            with formatter.section(heading):
                helps = [one.get_short_help_str(formatter.width - 6 - width) for one in commands]
                names = [f"{one.name:<{width}}" for one in commands]  # aligned over all headings
                formatter.write_dl(list(zip(names, helps, strict=True)))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuses addresses with secrets before any part of the command line repeats them."""
        for word in args:
            value = word.partition("=")[2] if word.startswith("--") else word
            if "://" in value and _has_secret(value):
                raise click.UsageError(
                    "an address must have no user, password, query or fragment, found one (not repeated here)"
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command of `ctx`."""
        try:
            return super().invoke(ctx)
        except EXPECTED as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader has closed the pipe, which click handles
            for line in describe_all(error):
                click.echo(f"trackbed: {line}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt as stop:
            _exit_interrupted(ctx, stop)
        except RuntimeError as error:
            # Python's waits release a lock that they do not hold where the signal arrives as they take it again.
            if not isinstance(error.__context__, KeyboardInterrupt):
                raise
            _exit_interrupted(ctx, error.__context__)


def _exit_interrupted(ctx: click.Context, stop: KeyboardInterrupt) -> NoReturn:
    click.echo(f"trackbed: interrupted{': ' if str(stop) else ''}{stop}", err=True)
    ctx.exit(_INTERRUPTED)


def _has_secret(word: str) -> bool:
    from trackbed.files.stores import is_address, secret_part

    try:
        return is_address(word) and secret_part(word) is not None
    except ValueError:
        return False  # the command says that it cannot be read


def _show_version(ctx: click.Context, parameter: click.Parameter, value: object) -> None:
    if not value or ctx.resilient_parsing:
        return
    from trackbed.kernels import available_levels, compiler

    click.echo(f"trackbed, version {__version__}")
    click.echo(f"kernels: built by {compiler()}, for this processor: {', '.join(available_levels())}")
    ctx.exit()


@click.group(
    cls=_CommandLine,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="From text to batches: `preprocess` the texts, write a blend file, look at its plan with `blend`, and read "
    "batches in a program with trackbed.open_blend; `build` makes the indices before the job. `trackbed COMMAND "
    "--help` says more.",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, the compiler of the kernels and the instruction levels, and exit.",
)
def trackbed() -> None:
    """Token files, blends and checkpoints for LLM pre-training, in Megatron's formats."""


for command in chain.from_iterable(_SECTIONS.values()):
    trackbed.add_command(command)


def main() -> None:
    """Runs the command line of this process."""
    signal.signal(signal.SIGTERM, _end)
    accept_any_text()
    try:
        trackbed(prog_name="trackbed")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        if code == _INTERRUPTED:
            exit_at_once(code)  # Python 3.12.1 crashes as it frees what an interrupted message to a process has left
        exit_if_busy(code)
        raise
    except OSError as error:  # of --help and --version, which are no commands
        click.echo(f"trackbed: {describe(error)}", err=True)
        raise SystemExit(1) from None


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Raises SystemExit, so that unfinished files are removed."""
    raise SystemExit(128 + number)
