from ._cell import Cell as Cell
from ._cell import Write as Write
from ._ledger import CAPACITY as CAPACITY
from ._ledger import UNNAMED as UNNAMED
from ._ledger import Ledger as Ledger
from ._parts import Parts as Parts
from ._pins import Pin as Pin
from ._plans import PushPlan as PushPlan
