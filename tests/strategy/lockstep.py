"""What replica functions do to variables, in numpy: a row for each replica, all of them
in lockstep. The oracle of tests that run replica functions in every way."""

import numpy as np

import zstrat as zs

A, S = zs.VariableAggregation, zs.VariableSynchronization

KINDS = [
    (A.SUM, S.ON_WRITE),
    (A.MEAN, S.ON_WRITE),
    (A.ONLY_FIRST_REPLICA, S.ON_WRITE),
    (A.NONE, S.ON_WRITE),
    (A.SUM, S.ON_READ),
    (A.MEAN, S.ON_READ),
    (A.ONLY_FIRST_REPLICA, S.ON_READ),
    (A.NONE, S.ON_READ),
]
"""Of variables: the first four have updates of rows."""

BINARY = {
    "assign": lambda old, new: new,
    "assign_add": np.add,
    "assign_sub": np.subtract,
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_update": lambda old, new: new,
}


def is_integer(array):
    return array.dtype.kind in "iu"


def mean(values):
    """Over the replicas. Of integers it is exact, and cut off towards zero."""
    if not is_integer(values):
        return values.sum(0) / len(values)
    totals = values.astype(object).sum(0, keepdims=True)[0]
    return divided(totals, len(values), values.dtype)


def divided(totals, count, dtype):
    """Integers of Python, cut off towards zero; what is too large wraps."""
    cut = [abs(x) // count * (1 if x >= 0 else -1) for x in np.ravel(totals)]
    return np.array(cut, np.int64).astype(dtype).reshape(totals.shape)


def merged(aggregation, values):
    """What an aggregation makes of one value of each replica."""
    match aggregation:
        case A.SUM:
            return values.sum(0, dtype=values.dtype)
        case A.MEAN:
            return mean(values)
    return values[0]


class Copies:
    """The copies that replicas have of one variable."""

    def __init__(self, kind, start, replicas):
        self.aggregation, self.synchronization = kind
        self.values = np.stack([start] * replicas)

    @property
    def is_own(self):
        """Whether each replica updates its own copy."""
        return self.synchronization is S.ON_READ or self.aggregation is A.NONE

    def write(self, what, values):
        """Each replica calls the method ``what`` with its row of ``values``."""
        if not self.is_own:
            values = np.stack([merged(self.aggregation, values)] * len(values))
        self.values = BINARY[what](self.values, values).astype(self.values.dtype)

    def write_rows(self, what, ids, values):
        """The same of rows: ``ids[replica]`` and ``values[replica]``."""
        if self.aggregation is A.MEAN and is_integer(values):
            # What all replicas together add to a row is divided and cut off once.
            whole = np.zeros((len(ids), *self.values.shape[1:]), object)
            for replica, rows in enumerate(ids):
                for place, row in enumerate(rows):
                    whole[replica, row] += values[replica, place].astype(object)
            moved = divided(whole.sum(0, keepdims=True)[0], len(ids), values.dtype)
            self.values = BINARY[what](self.values, moved)
            return
        values = values / len(ids) if self.aggregation is A.MEAN else values
        for copy, own in enumerate(self.values):
            for replica, rows in enumerate(ids):
                if self.is_own and replica != copy:
                    continue
                if self.aggregation is A.ONLY_FIRST_REPLICA and replica:
                    continue
                for place, row in enumerate(rows):
                    own[row] = BINARY[what](own[row], values[replica, place])

    @property
    def seen(self):
        """What is read outside of the replicas; None: that is refused."""
        if self.synchronization is S.ON_WRITE:
            return self.values[0]
        if self.aggregation is A.NONE:
            return None
        return merged(self.aggregation, self.values)

    def seen_from(self, replica):
        """The same in the process whose first replica this is."""
        is_apart = self.synchronization is S.ON_WRITE and self.aggregation is A.NONE
        return self.values[replica] if is_apart else self.seen
