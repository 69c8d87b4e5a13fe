"""``zstrat dashboard``: the page of a cluster, for a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from zstrat.errors import ZstratError
from zstrat.launch import ObservedRun, Observer
from zstrat.transport import run as run_loop
from zstrat.transport.health import dashboard as serve_page

from ._options import cluster_options, fail, settings, spec
from ._signals import interruptible

if TYPE_CHECKING:
    from pathlib import Path

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings


@click.command()
@cluster_options
@click.option(
    "--http",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="where the page is; 0 is any free port",
)
def dashboard(
    cluster: str | None, keys: Path | None, timeout: float, http: str
) -> None:
    """Serve a page that shows a running cluster, until Ctrl-C.

    At another address than one of loopback the page needs a token: ZSTRAT_HTTP_TOKEN,
    or one that is made and printed. A program can show more of its run: zs.dashboard().
    """
    chosen = settings(keys)
    try:
        # A signal is how it is meant to end: 0.
        run_loop(interruptible(_serve(spec(cluster), chosen, timeout, http)))
    except (ZstratError, ValueError, OSError) as error:
        fail(error)


async def _serve(
    spec: ClusterSpec, settings: Settings, timeout: float, http: str
) -> int:
    async with Observer(spec, settings) as observer:
        patience = settings.timeouts.patience
        with ObservedRun(observer, patience) as run, serve_page(http) as server:
            click.echo(server.url)
            run.take(await observer.look(timeout))
            if missing := run.readiness():
                click.echo(f"zstrat: {missing}, so far", err=True)
            await run.look_on()
