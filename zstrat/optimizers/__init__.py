"""Divides the program of an optax transformation into an update for each leaf of a
tree.

Import this package late, where gradients are applied, because it imports jax and optax.
"""

from ._binding import Binding as Binding
from ._cut import Coupling as Coupling
from ._cut import TreeCut as TreeCut
from ._delayed_nesterov import delayed_nesterov as delayed_nesterov
from ._elementwise import ElementwiseUpdate as ElementwiseUpdate
from ._elementwise import elementwise as elementwise
from ._leaf import LeafRule as LeafRule
from ._leaf import cut_for_rows as cut_for_rows
from ._leaf import leaf_rule as leaf_rule
from ._padding import dependence_on_padding as dependence_on_padding
from ._row_operations import RowOperations as RowOperations
from ._row_operations import row_operations as row_operations
from ._state import state_classes as state_classes
from ._structure import TreeStructure as TreeStructure
from ._transformation import Extras as Extras
from ._transformation import RandomNumbers as RandomNumbers
from ._transformation import checked as checked
from ._transformation import takes_extras as takes_extras
from ._tree import TreeRule as TreeRule
