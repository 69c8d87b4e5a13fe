"""The program ``zstrat`` and its commands.

A command is imported when it is asked for: what all of them import together takes twice
the processor time that a look at a cluster does.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, final

import click

from zstrat import __version__
from zstrat.config import did_you_mean
from zstrat.streams import complete

_BEHIND: Final = {
    "bench": "_bench.bench",
    "cluster": "_cluster.cluster",
    "dashboard": "_look.dashboard",
    "doctor": "_look.doctor",
    "down": "_up.down",
    "keygen": "_files.keygen",
    "manifests": "_files.write_manifests",
    "run": "_cluster.run",
    "slurm": "_slurm.slurm_command",
    "status": "_look.status",
    "top": "_top.top",
    "units": "_files.units",
    "up": "_up.up",
}
"""Module and name of each command."""

DAEMONS: Final = ("evaluator", "ps", "worker")
"""Programs of their own, `zstrat-ps` and so on."""


@final
class Commands(click.Group):
    """A group that imports the command that it is asked for, and no other."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        complete()
        return super().main(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_BEHIND)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in DAEMONS:
            hint = f"; did you mean 'zstrat-{name}'?"
        else:
            hint = did_you_mean(name, _BEHIND)
        if name not in _BEHIND and hint:
            ctx.fail(f"No such command {name!r}{hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _BEHIND:
            return None
        module, _, name = _BEHIND[cmd_name].partition(".")
        found = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        assert isinstance(found, click.Command)
        return found


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zstrat")
def main() -> None:
    """Parameter-server training for JAX.

    The daemons are programs of their own: zstrat-ps, zstrat-worker, zstrat-evaluator.
    """
