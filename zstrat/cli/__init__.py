"""The command line program ``zstrat``: starts clusters, runs copies of a program, and
shows the state of a cluster.

Law: this package only parses arguments and formats output; `zstrat.launch` does the
work.
"""

from ._main import main as main
