"""``zstrat-evaluator``: evaluates the checkpoints of a training as they appear.

The user's program is a function that makes two things: a ``zs.Checkpoint`` of what is
evaluated, and a function without arguments that returns metrics by name.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zstrat.cluster import TFConfigClusterResolver
from zstrat.config import environment
from zstrat.errors import NotFoundError

from . import MISTAKEN, folder, index_of, leave, parser, run_program, settings_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from ._main import Program


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the exit codes of `_main`."""
    arguments = parser("evaluator", "The evaluator of zstrat.", binds=False)
    add = arguments.add_argument
    add(
        "program",
        metavar="MODULE:FUNCTION",
        help="a function that returns (checkpoint, evaluate)",
    )
    add(
        "checkpoints",
        metavar="DIR",
        type=folder,
        help="folder of the training's checkpoints",
    )
    add(
        "--metrics",
        metavar="FILE.jsonl",
        type=Path,
        help="append a line for each evaluation",
    )
    add("--tensorboard", metavar="DIR", type=folder, help="write TensorBoard events")
    add(
        "--max-evaluations",
        metavar="N",
        type=int,
        help="end with checkpoint N or a later one",
    )
    add("--platform", metavar="NAME", help="cpu, cuda, rocm or tpu (JAX_PLATFORMS)")
    parsed = arguments.parse_args(argv)
    env = environment()
    try:
        index = place() if parsed.index is None else index_of(parsed.index)
        settings = settings_of(parsed, env)
    except ValueError as error:
        print(f"zstrat-evaluator: {error}", file=sys.stderr)
        leave(MISTAKEN)
    if parsed.platform is not None:
        # jax reads this once, when it is imported: by the program, later.
        os.environ["JAX_PLATFORMS"] = parsed.platform
    leave(run_program(f"evaluator:{index}", partial(evaluator, parsed), settings))


def place() -> int:
    """Which evaluator this is, by TF_CONFIG; 0 if it does not say.

    Raises:
        ValueError: It says that this is another task, or its index is none.
    """
    told = TFConfigClusterResolver()
    if told.task_type is None:
        return 0
    if told.task_type != "evaluator":
        raise ValueError(f"TF_CONFIG: task.type is {told.task_type!r}, not 'evaluator'")
    return told.task_id or 0


def evaluator(parsed: argparse.Namespace) -> Program:
    """What the arguments ask for.

    Raises:
        ValueError: The program cannot be had, or is something else, or a file is where
            a folder has to be or the other way round; says what.
    """
    # The user's modules and jax: after the arguments are known to be right.
    from zstrat.saving import (
        JsonLines,
        SidecarEvaluator,
        TensorBoardEvents,
        latest_checkpoint,
    )

    checkpoint, evaluate = made(parsed.program)
    writers: list[Any] = []
    try:
        latest_checkpoint(parsed.checkpoints)  # there may be none yet
        if parsed.metrics is not None:
            writers.append(JsonLines(parsed.metrics))
        if parsed.tensorboard is not None:
            writers.append(TensorBoardEvents(parsed.tensorboard))
    except (NotFoundError, OSError) as error:
        raise ValueError(str(error)) from error
    return SidecarEvaluator(
        checkpoint,
        evaluate,
        parsed.checkpoints,
        max_evaluations=parsed.max_evaluations,
        writers=writers,
    )


def made(program: str) -> tuple[Any, Callable[[], Mapping[str, Any]]]:
    """What ``MODULE:FUNCTION`` returns; the working folder counts, as for a script.

    Raises:
        ValueError: There is no such function, or it returns something else.
    """
    from zstrat.saving import Checkpoint

    name, _, function = program.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = vars(importlib.import_module(name))[function]
    except (ModuleNotFoundError, KeyError, ValueError) as error:
        raise ValueError(
            f"{program}: expected MODULE:FUNCTION that can be imported ({error!r})"
        ) from error
    if not callable(make):
        raise ValueError(f"{program} is {make!r:.80}: expected a function")
    try:
        with contextlib.suppress(ValueError):  # it does not say what it takes
            inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(
            f"{program}: expected a function without arguments ({error})"
        ) from error
    match make():
        case (Checkpoint() as checkpoint, evaluate) if callable(evaluate):
            return checkpoint, evaluate
        case other:
            raise ValueError(
                f"{program}() returned {type(other).__name__}: expected (zs.Checkpoint"
                ", a function without arguments that returns metrics)"
            )


if __name__ == "__main__":
    main()
