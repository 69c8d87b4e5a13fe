"""Integers of 64 bits in a program of 32: what ids are computed of must fit.

jax without ``jax_enable_x64`` takes the lower half of such an integer, and a row of
that number may be there. Law of the file: leaves are looked at only where ids are
computed of them; ids that are taken as they are keep their 64 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def is_narrowed(leaf: Any) -> bool:
    """Whether jax would take a leaf of integers for one of fewer bits."""
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "iu":
        return False
    return jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize < leaf.dtype.itemsize


def require_fitting(
    step: str, leaves: Sequence[Any], narrowed: Mapping[int, str]
) -> None:
    """Refuses leaves, by number, that do not fit 32 bits. Cost: a pass over each.

    Raises:
        ValueError: Names the place and the value.
    """
    for number, place in narrowed.items():
        leaf = np.asarray(leaves[number])
        fit = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
        if not leaf.size or fit.min <= int(leaf.min()) <= int(leaf.max()) <= fit.max:
            continue
        wrong = int(leaf[(leaf < fit.min) | (leaf > fit.max)].flat[0])
        raise ValueError(
            f"{place} of the step function {step!r} contains {wrong}, and ids of rows "
            f"are computed from it, where jax would take {leaf.dtype} for 32 bits and "
            "look up another row: make it fit before (hash it in the dataset), give "
            "ids as they are, or switch on jax_enable_x64 in this program and on the "
            "workers (JAX_ENABLE_X64=1)"
        )
