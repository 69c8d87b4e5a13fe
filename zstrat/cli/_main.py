"""The program and its commands."""

from __future__ import annotations

import click

from zstrat import __version__

from ._bench import bench
from ._cluster import cluster, run
from ._files import keygen, units
from ._look import dashboard, doctor, status
from ._manifests import write_manifests
from ._slurm import slurm_command
from ._top import top
from ._up import down, up


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zstrat")
def main() -> None:
    """Parameter-server training for JAX."""


_LOCAL = bench, cluster, dashboard, doctor, keygen, run, status, top, units
_ENGINES = down, slurm_command, up, write_manifests
for _command in (*_LOCAL, *_ENGINES):
    main.add_command(_command)
