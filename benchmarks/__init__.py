"""How fast zstrat is, beside what the machine allows: ``make bench``.

Every case runs in fresh processes of its own, several times, and measures its limit
(raw pyzmq, memcpy, the gradient alone) in the same run, so that the ratio means
something on a machine whose absolute numbers move by a third.
"""
