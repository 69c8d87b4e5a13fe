"""The program ``zstrat``: local clusters, copies of a program, a look at what runs.

Law: this package words and draws; what is true is found out in `zstrat.launch`.
"""

from ._main import main as main
