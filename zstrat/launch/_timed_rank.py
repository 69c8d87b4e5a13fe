"""One rank of a calibration: ``python -m zstrat.launch._timed_rank SIZES LANE``.

SIZES are bytes, with commas between. Rank 0 prints a line of JSON for each algorithm
and size: a list of the fields of a `Measurement` for every time.
"""

from __future__ import annotations

import json
import sys

from zstrat.collectives import Group

from ._timing import timings


def main() -> None:
    sizes, lane = [int(size) for size in sys.argv[1].split(",")], sys.argv[2]
    with Group(name="calibration", lane=lane) as group:
        for found in timings(group, sizes):
            if group.rank == 0:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
