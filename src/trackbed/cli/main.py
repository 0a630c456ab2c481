"""The command line: `trackbed COMMAND ...`.

Every command parses, calls the library, and prints. Exit status: 0, or 1 with one line on stderr if the library
says no (one for each thing that is wrong with a blend file), or 2 if the command line is wrong, or 128 and the
signal's number if a signal ended it.
"""

import errno
import signal
from types import FrameType
from typing import Any, NoReturn

import click

from trackbed import __version__
from trackbed.cli.blend import blend
from trackbed.cli.build import build
from trackbed.cli.cache import cache
from trackbed.cli.finish import finish
from trackbed.cli.inspect import inspect
from trackbed.cli.merge import merge
from trackbed.cli.messages import EXPECTED, describe_all
from trackbed.cli.preprocess import preprocess
from trackbed.cli.seal import seal
from trackbed.cli.show import show
from trackbed.cli.train_tokenizer import train_tokenizer
from trackbed.cli.uninterruptible import leave
from trackbed.cli.verify import verify

__all__ = ["main", "trackbed"]


class _OneLineErrors(click.Group):
    """Commands whose errors are one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that `ctx` names."""
        try:
            return super().invoke(ctx)
        except EXPECTED as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # whoever reads our output has seen enough, which click knows how to take
            for line in describe_all(error):
                click.echo(f"trackbed: {line}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("trackbed: interrupted", err=True)
            ctx.exit(128 + signal.SIGINT)


@click.group(cls=_OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trackbed")
def trackbed() -> None:
    """Token files for LLM pre-training, in Megatron's format."""


for command in (blend, build, cache, preprocess, train_tokenizer, merge, inspect, show, verify, seal, finish):
    trackbed.add_command(command)


def main() -> None:
    """Run the command line of this process."""
    signal.signal(signal.SIGTERM, _end)
    try:
        trackbed(prog_name="trackbed")
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 0)
        raise


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  a signal handler is called so
    """Leave as an exception does, so that unfinished files are removed."""
    raise SystemExit(128 + number)
