"""Applies plain updates and optimizers to variables, on the server that holds them."""

from __future__ import annotations

from ._arithmetic import SCATTERS as SCATTERS
from ._arithmetic import as_rows as as_rows
from ._arithmetic import check as check
from ._arithmetic import compute as compute
from ._arithmetic import gather as gather
