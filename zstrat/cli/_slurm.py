"""``zstrat slurm``: a program, its parameter servers and its workers as one job of
Slurm. What is submitted is a batch script that runs this command again on the first
node of the job, with ``--here``."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from zstrat.config import TRY_AGAIN, environment
from zstrat.launch import GPUS_BY_NODE, requeue, run_beside, slurm, slurm_program
from zstrat.signals import handle

from ._options import failures, folder, settings
from ._signals import as_interrupts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_OURS: Final = ("--signal=B:USR1@60", "--requeue", "--open-mode=append")


@click.command(
    "slurm",
    short_help="Run a program with its cluster as one job of Slurm.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
@click.option(
    "--ps",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="parameter servers",
)
@click.option(
    "--workers", type=click.IntRange(0), default=1, show_default=True, help="workers"
)
@click.option(
    "--print", "only_print", is_flag=True, help="print the batch script, submit nothing"
)
@click.option("--here", is_flag=True, help="run in this allocation, submit nothing")
@click.option("--dir", "directory", type=folder, help="keep logs there")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
def slurm_command(
    ps: int,
    workers: int,
    only_print: bool,
    here: bool,
    directory: Path | None,
    words: tuple[str, ...],
) -> None:
    """Run a Python program with parameter servers and workers as one job of Slurm.

    WORDS: options for sbatch, each with its value in the same word, such as
    --time=04:00:00 or -pgpu, then the program and what is for it.

    The program finds the tasks in TF_CONFIG and ZSTRAT_KEYS. SIGUSR1 reaches it before
    its time is over and before it is preempted; if it then ends with 75, as
    zs.PreemptionHandler does, the job is queued again.
    """
    count = next((n for n, word in enumerate(words) if word[:1] != "-"), len(words))
    options, command = words[:count], words[count:]
    if not command:
        raise click.UsageError(
            f"expected a program after the options, got {' '.join(words)!r} alone"
        )
    script = Path(command[0])
    if not script.is_file():
        what = "is not a file" if script.exists() else "does not exist"
        advice = "" if not options else _advice(options[-1], command[0])
        raise click.UsageError(f"program {command[0]!r} {what}{advice}")
    program = [str(script.absolute()), *command[1:]]
    with failures():
        if here:
            if options:
                raise ValueError(
                    f"--here submits nothing, so {options[0]}, an option of sbatch, "
                    "has no effect: leave it out, or leave out --here"
                )
            sys.exit(_run_here(ps, workers, directory, program))
        place = [] if directory is None else [f"--dir={directory.absolute()}"]
        counts = [f"--ps={ps}", f"--workers={workers}", *place]
        text = batch_script(ps + workers, options, counts, program)
        if only_print:
            click.echo(text, nl=False)
            return
        sbatch = slurm_program("sbatch")
        sys.exit(
            subprocess.run([sbatch], input=text, text=True, check=False).returncode
        )


def _advice(option: str, word: str) -> str:
    """How to write the word, if the option has no value without it."""
    is_long = option.startswith("--")
    if "=" in option if is_long else len(option) > 2:
        return ""
    both = f"{option}={word}" if is_long else f"{option}{word}"
    return f". If it is the value of {option}, write both as one word: {both}"


def batch_script(
    tasks: int, options: Sequence[str], counts: Sequence[str], program: Sequence[str]
) -> str:
    """What sbatch is given. The user's options come last, so theirs count.

    Raises:
        ValueError: An option, or the name of the program, would not stay on its line;
            or an option would have each task get the same GPU.
    """
    by_task = ("--gpus-per-task", "--ntasks-per-gpu")
    for option in options:
        if option.startswith(by_task):
            raise ValueError(f"{option}: {GPUS_BY_NODE}")
    name = f"--job-name={Path(program[0]).name}"
    said = [f"--ntasks={tasks}", name, *_OURS, *options]
    for option in said:
        if not option.isprintable():  # a new line would be a command of the script
            raise ValueError(
                f"{option!r:.80} has a character that does not print: expected one "
                "line of text for sbatch"
            )
    lines = [f"#SBATCH {shlex.quote(option)}" for option in said]
    # -P: modules are not looked for where the job happens to run.
    us = [sys.executable, "-P", "-m", "zstrat.cli", "slurm", "--here"]
    command = shlex.join([*us, *counts, *program])
    return "\n".join(["#!/bin/bash", *lines, f"exec {command}", ""])


def _run_here(
    ps: int, workers: int, directory: Path | None, program: Sequence[str]
) -> int:
    try:
        with as_interrupts(), _usr1_ends():
            fleet = slurm(
                ps,
                workers,
                # Where the program's own modules are, not ours.
                env={"PYTHONPATH": _beside(program[0])},
                directory=directory,
                settings=settings(None),
            )
        with fleet:
            code = run_beside(fleet, [sys.executable, *program])
    except _EndSoonError:
        code = TRY_AGAIN
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM
    if code == TRY_AGAIN:
        job = environment().get("SLURM_JOB_ID", "")
        said = requeue(job)
        if said:
            click.echo(f"zstrat: job {job} is not queued again: {said}", err=True)
    return code


def _beside(script: str) -> str:
    before = environment().get("PYTHONPATH")
    return ":".join([str(Path(script).parent), *([before] if before else [])])


class _EndSoonError(BaseException):
    """Slurm will end the job soon, and the program has not begun."""


@contextlib.contextmanager
def _usr1_ends() -> Iterator[None]:
    before = handle(signal.SIGUSR1, _end_soon)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _end_soon(number: int, frame: object) -> NoReturn:
    raise _EndSoonError
