"""``zstrat keygen``, ``zstrat units`` and ``zstrat manifests``: write the files for a
cluster of machines or for Kubernetes.
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

from ._options import count_option, fail, failures, folder

_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("directory", type=folder)
@click.option("--per-task", is_flag=True, help="make a key pair for each ps and worker")
@click.option("--ps", type=_COUNT, help="with --per-task: number of parameter servers")
@click.option("--workers", type=_COUNT, help="with --per-task: number of workers")
@click.option("--rotate", is_flag=True, help="replace the keys in DIRECTORY")
def keygen(
    directory: Path, per_task: bool, ps: int | None, workers: int | None, rotate: bool
) -> None:
    """Make the keys of a cluster: one pair per role, in DIRECTORY (mode 0700).

    With --per-task each task has its own key, so that one worker cannot impersonate
    another. Do not use it with replicas=1: a backup needs the key of the server that it
    replaces.

    With --rotate the keys in DIRECTORY are replaced while the cluster runs, in three
    calls. After each call copy DIRECTORY to all machines.
    """
    if rotate:
        if per_task or ps or workers:
            raise click.UsageError(
                "--rotate cannot be combined with --per-task, --ps or --workers"
            )
        _rotate(directory)
        return
    counts = {Job.PS: ps, Job.WORKER: workers}
    tasks = {job: count for job, count in counts.items() if count is not None}
    # All three or none of them.
    if per_task != (len(tasks) == len(counts)) or (tasks and not per_task):
        raise click.UsageError(
            "--per-task requires --ps and --workers and vice versa, for example: "
            "--per-task --ps 2 --workers 4"
        )
    with failures():
        paths = generate_keys(directory, tasks)
    # Paths only: a key on the terminal would stay in its history.
    for path in paths:
        click.echo(path)


def _rotate(directory: Path) -> None:
    with failures():
        done = rotate_keys(directory)
    click.echo(_STEPS[done].format(directory))


_STEPS: Final = {
    NEXT: "1 of 3: generated the next keys in {0}/next. Copy {0} to all machines, then "
    "run this command again to use them.",
    PREVIOUS: "2 of 3: the next keys are in use, and the previous ones still valid. "
    "Copy {0} to all machines, then run this command again to revoke the latter.",
    "": "3 of 3: the previous keys are revoked. Copy {0} to all machines, and remove "
    "{0}/next and {0}/previous there (rsync --delete).",
}


@click.command()
@click.option(
    "--bindir",
    type=folder,
    default=Path(sys.executable).parent,
    show_default=True,
    help="folder of the installed programs",
)
@click.option(
    "--to",
    type=folder,
    default=Path("/etc/systemd/system"),
    show_default=True,
    help="folder to write the units to",
)
@click.option(
    "--config",
    type=folder,
    default=Path("/etc/zstrat"),
    show_default=True,
    help="folder of cluster.toml and keys/ on the machines",
)
def units(bindir: Path, to: Path, config: Path) -> None:
    """Write systemd units of the daemons."""
    with failures():
        for path in write_units(bindir, to, config):
            click.echo(path)


_AMOUNTS = "NAME=AMOUNT,..."
KEYS: Final = Path("keys")


@click.command("manifests")
@click.argument("engine", type=click.Choice(list(KINDS)))
@click.option(
    "--name", default="zstrat", show_default=True, help="prefix of the object names"
)
@click.option("--image", required=True, help="image with zstrat and the program")
@count_option("--ps", help="parameter servers")
@count_option("--workers", help="workers")
@click.option("--namespace", default="", help="default: namespace of kubectl")
@click.option(
    "--ps-resources",
    metavar=_AMOUNTS,
    default="",
    help="resources of each parameter server",
)
@click.option(
    "--worker-resources",
    metavar=_AMOUNTS,
    default="",
    help="resources of each worker, such as cpu=4,memory=8Gi,nvidia.com/gpu=1",
)
@click.option(
    "--program-resources", metavar=_AMOUNTS, default="", help="resources of the program"
)
@click.option(
    "--port", type=int, default=2222, show_default=True, help="port of the daemons"
)
@click.option(
    "--http",
    type=int,
    default=9100,
    show_default=True,
    help="port for probes and Prometheus",
)
@count_option(
    "--restarts",
    least=0,
    default=20,
    help="number of failed pods that each job restarts",
)
@click.option("--keys", type=folder, metavar="DIR", help="key folder; default: keys")
@click.option(
    "--with-secrets",
    is_flag=True,
    help="also write the keys as Secrets; generates keys if there is no folder DIR",
)
@click.option(
    "--insecure", is_flag=True, help="use no keys; only for isolated networks"
)
@click.option(
    "--to", type=Path, metavar="FILE", help="output file; default: standard output"
)
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
    """Write Kubernetes manifests of a cluster and of PROGRAM with its arguments.

    Example: zstrat manifests kubernetes --image IMAGE -- python train.py --steps 100

    The output is YAML for kubectl apply -f. It has secret keys only with
    --with-secrets.
    """
    if with_secrets and insecure:
        raise click.UsageError("--with-secrets and --insecure cannot be combined")
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
        _write_text(text, to, is_secret=with_secrets)
    except (ImportError, OSError, ValueError) as error:
        fail(error)


def _secrets(cluster: PodCluster, keys: Path | None) -> list[dict[str, Any]]:
    """Makes Kubernetes Secrets from the given folder of keys, or from the default
    folder if it exists, or from new keys."""
    if keys is not None or KEYS.exists():
        return secrets_from(cluster, keys or KEYS)
    with tempfile.TemporaryDirectory(prefix="zstrat-") as folder:
        generate_keys(Path(folder, "keys"))
        return secrets_from(cluster, Path(folder, "keys"))


def _write_text(text: str, to: Path | None, *, is_secret: bool) -> None:
    if to is None:
        sys.stdout.write(text)
        return
    try:
        # Before it has contents; `touch` leaves the mode of a file that exists.
        if is_secret:
            to.touch(mode=0o600)
            to.chmod(0o600)
        to.write_text(text, "utf-8")
    except OSError as error:
        raise ValueError(f"--to: cannot write {to}: {error.strerror}") from error
    click.echo(to)
