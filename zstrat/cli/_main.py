"""The command line program ``zstrat``.

The module of a command is imported when the command is used: importing all of them
takes twice the processor time of ``zstrat status``.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, final

import click

from zstrat import __version__
from zstrat.config import did_you_mean
from zstrat.streams import complete

_COMMANDS: Final = {
    "bench": "_bench.bench",
    "cluster": "_cluster.cluster",
    "dashboard": "_look.dashboard",
    "doctor": "_look.doctor",
    "down": "_up.down",
    "keygen": "_files.keygen",
    "manifests": "_files.write_manifests",
    "run": "_cluster.run",
    "slurm": "_cluster.slurm_command",
    "status": "_look.status",
    "top": "_top.top",
    "units": "_files.units",
    "up": "_up.up",
}
"""Module and function of each command."""

DAEMONS: Final = ("evaluator", "ps", "worker")
"""The daemons, which are separate programs such as `zstrat-ps`."""


@final
class Commands(click.Group):
    """A click group that imports only the module of the command that is used."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # Before click prints anything: a stream that was closed at the start is None.
        complete()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # People look for the daemons here, where all else is.
        name = args[0]
        if name in DAEMONS:
            hint = f"; did you mean 'zstrat-{name}'?"
        else:
            hint = did_you_mean(name, _COMMANDS)
        if name not in _COMMANDS and hint:
            ctx.fail(f"No such command {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(".")
        command = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        assert isinstance(command, click.Command)
        return command


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zstrat")
def main() -> None:
    """Parameter-server training for JAX.

    The daemons are separate programs: zstrat-ps, zstrat-worker, zstrat-evaluator.
    """
