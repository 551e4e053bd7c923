"""The command line `harness`: thin commands over the program's functions.

The only module tree that reads the environment (`HARNESS_CACHE_DIR`, `HARNESS_DATA_DIR`) or exits.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import click

from harness.commands.compare import compare
from harness.commands.dashboard import dashboard
from harness.commands.datasets import datasets
from harness.commands.env import env
from harness.commands.methods import methods
from harness.commands.pairs import pairs
from harness.commands.paper import paper
from harness.commands.profile import profile
from harness.commands.report import report
from harness.commands.run import run
from harness.commands.show import show
from harness.commands.simulate import simulate
from harness.commands.tune import tune
from harness.commands.verify import verify
from harness.errors import HarnessError
from harness.messages import first_line

INTERRUPTED = 130  # the shell's code for a process that SIGINT ended


class CommandLine(click.Group):
    """Turns every expected error into one line on stderr and its exit code."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except click.Abort:
            _fail("interrupted", INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HarnessError as error:
            if ctx.params["debug"]:
                raise
            _fail(first_line(error), error.exit_code)


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="saguaro-harness", message="%(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Benchmarks speculative decoding: every method, the same machine, the same clock."""


for command in (
    run,
    tune,
    verify,
    show,
    compare,
    report,
    dashboard,
    paper,
    simulate,
    profile,
    methods,
    pairs,
    datasets,
    env,
):
    cli.add_command(command)


def main() -> NoReturn:
    """The console script."""
    cli.main(prog_name="harness")


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(code)
