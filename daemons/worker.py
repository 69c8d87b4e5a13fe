"""``zstrat-worker``: runs the step functions of a coordinator on local devices."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from zstrat.launch import choose_devices

from . import MISTAKEN, leave, order, parser, run

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the exit codes of `_main`."""
    arguments = parser("worker", "A worker of zstrat.")
    arguments.add_argument(
        "--platform", metavar="NAME", help="cpu, cuda, rocm or tpu (JAX_PLATFORMS)"
    )
    arguments.add_argument(
        "--devices",
        metavar="N|LIST",
        help="on cpu how many virtual devices; on cuda which ones, as in 0,2",
    )
    parsed = arguments.parse_args(argv)
    try:
        asked = order(parsed, "worker")
        choice = devices(parsed.platform, parsed.devices)
    except ValueError as error:
        print(f"zstrat-worker: {error}", file=sys.stderr)
        leave(MISTAKEN)
    choose_devices(choice)
    leave(run(asked))


def devices(platform: str | None, given: str | None) -> dict[str, str]:
    """The variables that make jax see the devices that were asked for.

    Raises:
        ValueError: ``--devices`` is not what the platform expects.
    """
    chosen = {} if platform is None else {"JAX_PLATFORMS": platform}
    if given is None:
        return chosen
    numbers = given.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--devices {given}: expected numbers, as in 2 or 0,1")
    match platform:
        case "cpu" if len(numbers) == 1 and int(given) > 0:
            return {**chosen, "JAX_NUM_CPU_DEVICES": given}
        case "cuda":
            return {**chosen, "CUDA_VISIBLE_DEVICES": given}
        case "rocm":
            return {**chosen, "HIP_VISIBLE_DEVICES": given}
    raise ValueError(
        f"--devices {given}: expected --platform cpu and one number above 0, "
        "or --platform cuda or rocm and a list of devices"
    )


if __name__ == "__main__":
    main()
