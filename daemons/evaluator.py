"""``zstrat-evaluator``: evaluates the checkpoints of a training run as they appear.

The user passes a function that returns two things: a ``zs.Checkpoint`` of the evaluated
objects, and a function without arguments that returns metrics by name.
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

from . import (
    folder,
    index_of,
    leave,
    parser,
    refusals,
    run_evaluator,
    settings_of,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.saving import SidecarEvaluator


def main(argv: Sequence[str] | None = None) -> None:
    """Runs an evaluator; ends the process with the exit codes of `_main`."""
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
        help="folder in which the training saves its checkpoints",
    )
    add(
        "--metrics",
        metavar="FILE.jsonl",
        type=Path,
        help="append one line per evaluation to this file",
    )
    add("--tensorboard", metavar="DIR", type=folder, help="write TensorBoard events")
    add(
        "--max-evaluations",
        metavar="N",
        type=int,
        help="exit after evaluating checkpoint N or a later one",
    )
    add(
        "--platform",
        metavar="NAME",
        help="platform of jax: cpu, cuda, rocm or tpu (sets JAX_PLATFORMS)",
    )
    parsed = arguments.parse_args(argv)
    env = environment()
    with refusals("evaluator"):
        index = task_index() if parsed.index is None else index_of(parsed.index)
        settings = settings_of(parsed, env)
    if parsed.platform is not None:
        # jax reads this once, when the user's program imports it, later.
        os.environ["JAX_PLATFORMS"] = parsed.platform
    leave(run_evaluator(f"evaluator:{index}", partial(evaluator, parsed), settings))


def task_index() -> int:
    """Reads the index of this evaluator from TF_CONFIG; 0 if TF_CONFIG has none.

    Raises:
        ValueError: TF_CONFIG describes a task of another job, or its index is invalid.
    """
    resolver = TFConfigClusterResolver()
    if resolver.task_type is None:
        return 0
    if resolver.task_type != "evaluator":
        raise ValueError(
            f"TF_CONFIG: task.type is {resolver.task_type!r}, expected 'evaluator'"
        )
    return resolver.task_id or 0


def evaluator(parsed: argparse.Namespace) -> SidecarEvaluator:
    """Makes the evaluator that the arguments describe.

    Raises:
        ValueError: The program cannot be imported or returns something else, or a path
            is a file instead of a folder, or the other way round.
    """
    # Imports jax: only after the arguments are known to be right.
    from zstrat.saving import (
        JsonLines,
        SidecarEvaluator,
        TensorBoardEvents,
        latest_checkpoint,
    )

    checkpoint, evaluate = load_program(parsed.program)
    writers: list[Any] = []
    try:
        latest_checkpoint(parsed.checkpoints)  # checks the path; may find none yet
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


def load_program(program: str) -> tuple[Any, Callable[[], Mapping[str, Any]]]:
    """Imports and calls ``MODULE:FUNCTION``; returns its checkpoint and its evaluation
    function. Modules in the working folder are found, as for a script.

    Raises:
        ValueError: There is no such function, or it returns something else.
    """
    from zstrat.saving import Checkpoint

    # As Python does for a script; the program `zstrat-evaluator` has its own folder
    # there.
    name, _, function = program.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = vars(importlib.import_module(name))[function]
    except (ModuleNotFoundError, KeyError, ValueError) as error:
        raise ValueError(
            f"{program}: cannot be imported ({error!r}); expected MODULE:FUNCTION"
        ) from error
    if not callable(make):
        raise ValueError(f"{program}: expected a function, got {make!r:.80}")
    # Before the call: a TypeError inside of the function is a crash of its own, with a
    # traceback.
    try:
        with contextlib.suppress(ValueError):  # a builtin without a signature
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
                f"{program}() returned {type(other).__name__}: expected a pair of a "
                "zs.Checkpoint and a function without arguments that returns metrics"
            )


if __name__ == "__main__":
    main()
