"""``zs.hash_ids``: ids of 64 bits for texts, the same on every machine.

A table of any id (`zs.HashTable`) needs no list of the texts that may come: the hash of
a text is its id. Two of a billion texts have the same one with a chance of 3 %.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import xxhash

_PADDING: Final = 1 - 2**31
"""The id that look-ups take for padding; no text has it."""


def hash_ids(values: Any, *, seed: int = 0) -> np.ndarray:
    """Returns an id for each of some texts, bytes or integers: int64 of their shape.

    Texts are hashed in UTF-8 by XXH3 [Collet 2019], integers by their eight bytes as a
    signed little-endian number: an integer and its text have different ids. It runs in
    input pipelines (``dataset.map``); jax has no texts.

    Args:
        values: A text, or an array or nested lists of equal lengths.
        seed: Texts of another feature get other ids with another seed, so that several
            features may share a table.

    Raises:
        TypeError: They are something else.
    """
    array = np.asarray(values)
    if array.dtype.kind in "iu" and array.size:
        words = array.astype(np.int64).astype("<i8").reshape(-1)
        parts = [word.tobytes() for word in words]
    elif array.dtype.kind in "SUO" or not array.size:
        parts = [_bytes(value) for value in array.reshape(-1).tolist()]
    else:
        raise TypeError(
            f"hash_ids takes texts, bytes or integers, got {array.dtype.name}: round "
            "numbers to integers, or divide their range into bins (np.digitize)"
        )
    hashes = [xxhash.xxh3_64_intdigest(part, seed) for part in parts]
    ids = np.array(hashes, np.uint64).view(np.int64).reshape(array.shape)
    ids[ids == _PADDING] += 1
    return ids


def _bytes(value: Any) -> bytes:
    match value:
        case str():
            return value.encode()
        case bytes():
            return value
        case int() if not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return value.to_bytes(8, "little", signed=True)
    raise TypeError(
        f"hash_ids takes texts, bytes or integers of 64 bits, got {value!r:.80}"
    )
