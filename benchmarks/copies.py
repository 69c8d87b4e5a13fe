"""``python -m benchmarks.copies N COMMAND...``: N copies over loopback ports, and what
rank 0 prints. The ports are free for anybody to bind: gloo meets at the first one."""

from __future__ import annotations

import sys

from zstrat.launch import Copies, run_copies
from zstrat.transport import run


def main() -> int:
    count, command = int(sys.argv[1]), tuple(sys.argv[2:])
    first: list[str] = []
    others: list[str] = []

    def write(line: str) -> None:
        name, _, text = line.partition(" | ")
        (first if name == "worker:0" else others).append(text or name)

    code = run(run_copies(Copies(command, count, "tcp"), write))
    print("\n".join([*others, *first] if code else first))
    return code


if __name__ == "__main__":
    sys.exit(main())
