"""docs/observing.md lists the numbers of a task as the registry has them.

`make metrics` writes the table.
"""

import re
from pathlib import Path

from zstrat.telemetry import COLUMNS, METRICS, task_metrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observing.md"
TABLE = re.compile(r"(?<=\| key \| of \| unit \| what \|\n)(\|.*\n)+")
TASKS = {"ps": "parameter server", "worker": "worker"}


def table():
    """The rows below the heading of the table."""
    rows = [
        f"| `{each.name}` | {' and '.join(TASKS[job] for job in reversed(each.of))} "
        f"| {each.unit} | {each.help} |\n"
        for each in METRICS
        if each.name in COLUMNS and set(each.of) <= set(TASKS)
    ]
    return "|---|---|---|---|\n" + "".join(rows)


def test_the_page_has_every_number_of_a_task():
    found = TABLE.search(PAGE.read_text())
    assert found, f"{PAGE.name} has no such table"
    assert found[0] == table(), "write it by `make metrics`"


def test_a_number_has_one_name_and_one_unit_in_all_tasks():
    several = [*task_metrics("ps"), *task_metrics("worker")]
    assert len({(m.name, m.unit, m.kind) for m in several}) == len(COLUMNS)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(TABLE.sub(lambda _: table(), text))
