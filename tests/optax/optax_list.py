"""Writes docs/optimizers_table.md, of what the programs do now.

    python tests/optax/optax_list.py            runs them, and writes the list
    python tests/optax/optax_list.py --check    fails if it is not what it would write

It writes nothing while a result is wrong: the list says what may be relied on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import optax
from optax_catalogue import every_case, transformations
from optax_judged import complaints, grouped, table
from optax_processes import outcomes

LIST = Path(__file__).parents[2] / "docs" / "optimizers_table.md"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        homes = ["none_in_a_step", "servers_in_steps"]
        said = outcomes(
            "float64", homes, Path(folder) / "said.json", "--coupled", timeout=3600
        )
    found = complaints(every_case(), said["outcomes"])
    if found:
        print(grouped(found), file=sys.stderr)
        return 1
    text = table(
        transformations(), said["outcomes"], set(said["coupled"]), optax.__version__
    )
    if "--check" not in sys.argv:
        LIST.write_text(text)
    elif not LIST.exists() or LIST.read_text() != text:
        print(f"{LIST} is not up to date: make optimizers writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
