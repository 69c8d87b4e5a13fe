"""Handles of variables: what they are, where they live, how a step meets them."""

from . import initializers as initializers
from ._apply import apply as apply
from ._creator import Creator as Creator
from ._creator import Request as Request
from ._creator import creator as creator
from ._creator import initialize as initialize
from ._home import Detached as Detached
from ._home import Home as Home
from ._home import LocalHome as LocalHome
from ._home import read_all as read_all
from ._module import Module as Module
from ._optimizer import Optimizer as Optimizer
from ._recorder import Recorder as Recorder
from ._recorder import recorder as recorder
from ._slices import IndexedSlices as IndexedSlices
from ._spec import LOCAL as LOCAL
from ._spec import VariableAggregation as VariableAggregation
from ._spec import VariableSpec as VariableSpec
from ._spec import VariableSynchronization as VariableSynchronization
from ._staging import is_staging as is_staging
from ._tree import create_variables as create_variables
from ._tree import values as values
from ._variable import Variable as Variable
from ._variable import detached as detached
from ._variable import handle as handle
