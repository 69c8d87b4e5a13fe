"""What workers print is heard by the program that they work for."""

import re
import shutil
from pathlib import Path

import programs
import pytest

pytestmark = pytest.mark.usefixtures("programs")

PROGRAM = Path(__file__).with_name("printing_program.py")


@pytest.fixture(scope="module")
def ran():
    """The program's two streams, as a terminal shows them."""
    done = programs.run(
        [PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    yield done
    for line in done.stderr.splitlines():
        if "its log is kept" in line:
            shutil.rmtree(Path(line.rpartition(" ")[2]).parent)


def _is_own(line):
    return line.startswith("-- ")


def parts(done):
    """What was printed before each line of the program, and that line."""
    found, lines = [], []
    for line in done.stdout.splitlines():
        if _is_own(line):
            found.append((line, lines))
            lines = []
        else:
            lines.append(line)
    assert not lines
    return found


def test_all_that_a_step_printed_is_there_when_it_was_fetched(ran):
    (own, first), *others = parts(ran)
    # The program itself has printed "traced" at the same time, in two pieces.
    words = ["worker:0| dataset of 0", "worker:0| traced", "worker:0| sum 3.0"]
    text = "\n".join(first)
    assert (own, text.count("traced")) == ("-- traced", 2)
    assert re.findall("|".join(map(re.escape, words)), text) == words
    assert others[:3] == [
        ("-- traced", ["worker:0| sum 3.0"]),
        ("-- eager", ["worker:0| eager"]),
        ("-- eager", ["worker:0| eager"]),
    ]


def test_warnings_and_records_go_to_standard_error(ran):
    lines = [line for line in ran.stderr.splitlines() if line.startswith("worker:0| ")]
    (warning,) = [line for line in lines if "UserWarning: warned" in line]
    assert "printing_program.py:" in warning, "once per place, as Python shows it"
    logged = "worker:0| WARNING:root:logged"
    assert [line for line in lines if "warn" not in line] == [
        "worker:0| to stderr", logged, "worker:0| to stderr", logged
    ]  # fmt: skip


def test_of_a_flood_it_is_told_how_much_is_not_shown(ran):
    own, lines = parts(ran)[4]
    shown = [line for line in lines if line.startswith("worker:0| flood ")]
    told = [re.search(r"\(([\d,]+) lines are not shown", line) for line in lines]
    dropped = sum(int(match[1].replace(",", "")) for match in told if match)
    printed = int(own.removeprefix("-- flood "))
    assert dropped > 0
    assert len(shown) + dropped == printed
    numbers = [int(line.rpartition(" ")[2]) for line in shown]
    assert numbers == sorted(numbers)


def test_it_can_be_left_to_the_logs(ran):
    assert parts(ran)[5] == ("-- files", [])


def test_the_log_of_a_worker_that_crashed_is_kept(ran):
    assert parts(ran)[6][0] == "-- end"
    words = r"^worker:0 was killed by SIGSEGV; its log is kept: (.+)$"
    (path,) = re.findall(words, ran.stderr, re.MULTILINE)
    log = Path(path).read_text()
    assert "last words" in log
    assert log.count("ready at") == 2, "of all its lives"
