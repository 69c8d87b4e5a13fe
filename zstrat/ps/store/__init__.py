"""The variables of one server: values, versions, what was applied already."""

from typing import TYPE_CHECKING

from zstrat.doors import by_name, fetched_late

if TYPE_CHECKING:
    from ._cell import Cell as Cell
    from ._cell import Write as Write
    from ._ledger import CAPACITY as CAPACITY
    from ._ledger import UNNAMED as UNNAMED
    from ._ledger import Ledger as Ledger
    from ._parts import Parts as Parts
    from ._pins import Pin as Pin
    from ._plans import PushPlan as PushPlan
else:
    __getattr__, __dir__ = fetched_late(
        __name__,
        by_name(
            {
                "._cell": "Cell Write",
                "._ledger": "CAPACITY UNNAMED Ledger",
                "._parts": "Parts",
                "._pins": "Pin",
                "._plans": "PushPlan",
            }
        ),
    )
