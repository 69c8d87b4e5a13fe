"""`Wire`: the format in which an optimizer's gradients travel."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from zstrat.wire import Codec

_PUSH: Final = MappingProxyType(
    {
        "bfloat16": Codec.BFLOAT16,
        "int8": Codec.INT8,
        "int4": Codec.INT4,
        "e3m0": Codec.E3M0,
        "topk": Codec.TOP_K,
    }
)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The format in which the gradients of an optimizer travel to parameter servers,
    and the values that it trains come back.

    A server decodes them to float32 before it adds or applies anything. They travel
    whole to a server in this host's shared memory, in arrays of fewer than 256 numbers,
    if they are integers or complex, and if their dtype is as small as the format.

    Args:
        push: Of gradients. "bfloat16": half the bytes of float32. "int8", "int4", and
            "e3m0" (4 bits: a sign and a power of two): one float32 scale for each 256
            numbers, of rows for each 128; 0.25 and 0.13 of the bytes. "topk": the
            largest numbers only.
        error_feedback: What rounding leaves out of a gradient is added to that of the
            worker's next step. True needs memory of the worker, one float32 for each
            number of the variables. False: numbers are rounded up or down at random, so
            that they are right in the mean. Default: only for "topk", which needs it.
            Rows of tables are rounded at random in any case.
        density: The share of the numbers that "topk" sends.
        pull: Of values, in steps that apply the optimizer. "bfloat16": such a step
            reads a float32 variable that it trains rounded to the nearest bfloat16.
            Rows of tables travel whole. Servers keep float32.

    Raises:
        ValueError: An argument is not valid.
    """

    push: str | None = None
    error_feedback: bool | None = None
    density: float | None = None
    pull: str | None = None

    def __post_init__(self) -> None:
        if self.pull not in (None, "bfloat16"):
            raise ValueError(
                f"Wire(pull={self.pull!r:.80}): expected 'bfloat16' or None"
            )
        if self.push not in [*_PUSH, *([] if self.pull is None else [None])]:
            raise ValueError(
                f"Wire(push={self.push!r:.80}): expected one of "
                f"{', '.join(map(repr, _PUSH))}"
            )
        feeds, is_top = self.error_feedback, self.codec is Codec.TOP_K
        if not isinstance(feeds, bool | None):
            raise ValueError(
                f"Wire(error_feedback={feeds!r:.80}): expected True, False, or None"
            )
        if (feeds and self.codec in (Codec.NONE, Codec.BFLOAT16)) or (
            feeds is False and is_top
        ):
            want = "True: what is not sent would be lost" if is_top else "False"
            raise ValueError(
                f"Wire(push={self.push!r}, error_feedback={feeds}): expected {want}"
            )
        density = self.density
        if (density is None) == is_top or not (
            density is None
            or (isinstance(density, float | np.floating) and 0 < density <= 1)
        ):
            want = "the share of numbers to send, say 0.01" if is_top else "None"
            raise ValueError(
                f"Wire(push={self.push!r}, density={density!r:.80}): expected {want}"
            )

    @property
    def codec(self) -> Codec:
        """The format of gradients."""
        return Codec.NONE if self.push is None else _PUSH[self.push]

    @property
    def has_feedback(self) -> bool:
        """Whether what rounding leaves out is sent later."""
        if self.error_feedback is None:
            return self.codec is Codec.TOP_K
        return self.error_feedback


def wire_format(wire: Any) -> Wire | None:
    """Returns the format that a user asks for: a `Wire`, the name of a push format, or
    None.

    Raises:
        TypeError: It is something else.
        ValueError: There is no such format.
    """
    if isinstance(wire, str):
        return Wire(push=wire, density=0.01 if wire == "topk" else None)
    if not isinstance(wire, Wire | None):
        raise TypeError(f"wire={wire!r:.80}: expected a zs.Wire, a name, or None")
    return wire
