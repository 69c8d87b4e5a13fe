"""Loops that are compiled when zstrat is installed: they copy and update rows."""

from __future__ import annotations

from ._rows import IS_BUILT as IS_BUILT
from ._rows import MOST_REGISTERS as MOST_REGISTERS
from ._rows import MOST_TABLES as MOST_TABLES
from ._rows import LoopProgram as LoopProgram
from ._rows import RowOperation as RowOperation
from ._rows import put_rows as put_rows
from ._rows import take_rows as take_rows
