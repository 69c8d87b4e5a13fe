"""``zstrat keygen``, ``zstrat units`` and ``zstrat manifests``: files that a cluster of
machines, or Kubernetes, needs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import click

from zstrat.launch import write_units
from zstrat.launch.manifests import (
    KINDS,
    PodCluster,
    manifests,
    resources_from,
    secrets_from,
    written,
)
from zstrat.transport import NEXT, PREVIOUS, generate_keys, rotate_keys
from zstrat.wire import Job

from ._options import fail, failures, folder

_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("directory", type=folder)
@click.option("--per-task", is_flag=True, help="A pair for each ps and each worker.")
@click.option("--ps", type=_COUNT, help="With --per-task: how many parameter servers.")
@click.option("--workers", type=_COUNT, help="With --per-task: how many workers.")
@click.option("--rotate", is_flag=True, help="Change the keys that are there.")
def keygen(
    directory: Path, per_task: bool, ps: int | None, workers: int | None, rotate: bool
) -> None:
    """Make the keys of a cluster. One pair per role, in DIRECTORY (mode 0700).

    With --per-task a key also says which task its holder is, so that nobody who has the
    key of one worker can pass for another. With replicas=1 leave it out: a server that
    takes the place of another one has to have its key.

    With --rotate the keys in DIRECTORY are changed while all tasks go on, by three
    calls; after each of them copy DIRECTORY to all machines.
    """
    if rotate:
        if per_task or ps or workers:
            raise click.UsageError(
                "--rotate changes the keys that are there: leave out --per-task, --ps "
                "and --workers"
            )
        _rotate(directory)
        return
    counts = {Job.PS: ps, Job.WORKER: workers}
    tasks = {job: count for job, count in counts.items() if count is not None}
    if per_task != (len(tasks) == len(counts)) or (tasks and not per_task):
        raise click.UsageError(
            "--per-task, --ps and --workers go together, as in: --per-task --ps 2 "
            "--workers 4"
        )
    with failures():
        made = generate_keys(directory, tasks)
    for path in made:
        click.echo(path)


def _rotate(directory: Path) -> None:
    with failures():
        done = rotate_keys(directory)
    click.echo(_STEPS[done].format(directory))


_STEPS: Final = {
    NEXT: "1 of 3: the next keys are in {0}/next. Copy {0} to all machines, and when "
    "all have it call this again: then those keys are used.",
    PREVIOUS: "2 of 3: the next keys are in use, the previous ones still valid. Copy "
    "{0} to all machines, and when all have it call this again: then the previous ones "
    "are no longer valid.",
    "": "3 of 3: the previous keys are no longer valid. Copy {0} to all machines, and "
    "remove {0}/next and {0}/previous there (rsync --delete).",
}


@click.command()
@click.option(
    "--bindir", type=folder, default=Path(sys.executable).parent, show_default=True
)
@click.option(
    "--to", type=folder, default=Path("/etc/systemd/system"), show_default=True
)
@click.option("--config", type=folder, default=Path("/etc/zstrat"), show_default=True)
def units(bindir: Path, to: Path, config: Path) -> None:
    """Write the systemd units of daemons.

    The programs are in --bindir; cluster.toml and keys/ are in --config.
    """
    with failures():
        for path in write_units(bindir, to, config):
            click.echo(path)


_AMOUNTS = "NAME=AMOUNT,..."
KEYS: Final = Path("keys")


@click.command("manifests")
@click.argument("engine", type=click.Choice(list(KINDS)))
@click.option(
    "--name", default="zstrat", show_default=True, help="prefix of all objects' names"
)
@click.option("--image", required=True, help="image with zstrat and the program")
@click.option(
    "--ps", type=_COUNT, default=1, show_default=True, help="parameter servers"
)
@click.option("--workers", type=_COUNT, default=1, show_default=True, help="workers")
@click.option("--namespace", default="", help="default: that of kubectl")
@click.option(
    "--ps-resources", metavar=_AMOUNTS, default="", help="of each parameter server"
)
@click.option(
    "--worker-resources",
    metavar=_AMOUNTS,
    default="",
    help="of each worker, as in cpu=4,memory=8Gi,nvidia.com/gpu=1",
)
@click.option(
    "--program-resources", metavar=_AMOUNTS, default="", help="of the program"
)
@click.option(
    "--port", type=int, default=2222, show_default=True, help="port of the daemons"
)
@click.option(
    "--http", type=int, default=9100, show_default=True, help="port of their probes"
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="how often each job restarts failed pods",
)
@click.option("--keys", type=folder, metavar="DIR", help="key folder; default: keys")
@click.option(
    "--with-secrets",
    is_flag=True,
    help="Write the keys as Secrets, too; new keys if there is no folder DIR.",
)
@click.option(
    "--insecure", is_flag=True, help="Use no keys: only on a network of your own."
)
@click.option("--to", type=Path, metavar="FILE", help="default: standard output")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def write_manifests(
    engine: str,
    image: str,
    name: str,
    ps: int,
    workers: int,
    namespace: str,
    ps_resources: str,
    worker_resources: str,
    program_resources: str,
    port: int,
    http: int,
    restarts: int,
    keys: Path | None,
    with_secrets: bool,
    insecure: bool,
    to: Path | None,
    program: tuple[str, ...],
) -> None:
    """Write a cluster for Kubernetes: its daemons, and PROGRAM with its arguments.

    As in: zstrat manifests kubernetes --image IMAGE -- python train.py --steps 100

    It is YAML, for kubectl apply -f. Secret keys are in it only with --with-secrets.
    """
    if with_secrets and insecure:
        raise click.UsageError("--with-secrets and --insecure exclude each other")
    try:
        cluster = PodCluster(
            name,
            image,
            ps,
            workers,
            program,
            namespace,
            {
                "ps": resources_from(ps_resources),
                "worker": resources_from(worker_resources),
                "program": resources_from(program_resources),
            },
            port,
            http,
            not insecure,
            restarts,
        )
        objects = manifests(engine, cluster)
        if with_secrets:
            objects = [*_secrets(cluster, keys), *objects]
        text = written(cluster, objects, "" if with_secrets else str(keys or KEYS))
        _put(text, to, is_secret=with_secrets)
    except (ImportError, OSError, ValueError) as error:
        fail(error)


def _secrets(cluster: PodCluster, keys: Path | None) -> list[dict[str, Any]]:
    """Secrets with the keys of the folder that is said; else of one that is there, else
    with keys that nobody else has."""
    if keys is not None or KEYS.exists():
        return secrets_from(cluster, keys or KEYS)
    with tempfile.TemporaryDirectory(prefix="zstrat-") as folder:
        generate_keys(Path(folder, "keys"))
        return secrets_from(cluster, Path(folder, "keys"))


def _put(text: str, to: Path | None, *, is_secret: bool) -> None:
    if to is None:
        sys.stdout.write(text)
        return
    try:
        if is_secret:
            to.touch(mode=0o600)
            to.chmod(0o600)
        to.write_text(text, "utf-8")
    except OSError as error:
        raise ValueError(f"--to: cannot write {to}: {error.strerror}") from error
    click.echo(to)
