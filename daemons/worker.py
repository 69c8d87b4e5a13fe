"""``zstrat-worker``: runs the step functions of a coordinator on local devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.launch import choose_devices

from . import leave, options_from, parser, refusals, run

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a worker; ends the process with the exit codes of `_main`."""
    arguments = parser("worker", "A worker of zstrat.")
    arguments.add_argument(
        "--platform",
        metavar="NAME",
        help="platform of jax: cpu, cuda, rocm or tpu (sets JAX_PLATFORMS)",
    )
    arguments.add_argument(
        "--devices",
        metavar="N|LIST",
        help="with --platform cpu: number of virtual devices; with cuda or rocm: "
        "indices of the devices, such as 0,2",
    )
    parsed = arguments.parse_args(argv)
    with refusals("worker"):
        options = options_from(parsed, "worker")
        choice = devices(parsed.platform, parsed.devices)
    # Before `run`, which imports jax; a forked daemon has it, with no backend yet.
    choose_devices(choice)
    leave(run(options))


def devices(platform: str | None, given: str | None) -> dict[str, str]:
    """Returns the environment variables that make jax use the requested devices.

    Raises:
        ValueError: ``--devices`` does not fit the platform.
    """
    chosen = {} if platform is None else {"JAX_PLATFORMS": platform}
    if given is None:
        return chosen
    numbers = given.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"--devices {given}: expected numbers separated by commas, such as 2 or 0,1"
        )
    # Each platform has its own variable. Devices of the CPU are virtual, so that a
    # number suffices.
    match platform:
        case "cpu" if len(numbers) == 1 and int(given) > 0:
            return {**chosen, "JAX_NUM_CPU_DEVICES": given}
        case "cuda":
            return {**chosen, "CUDA_VISIBLE_DEVICES": given}
        case "rocm":
            return {**chosen, "HIP_VISIBLE_DEVICES": given}
    raise ValueError(
        f"--devices {given}: expected one number above 0 with --platform cpu, or a "
        f"list of indices with --platform cuda or rocm; got --platform {platform}"
    )


if __name__ == "__main__":
    main()
