"""Processes that are started without standard streams, which is not /dev/null: they
work, end with 0, and nothing of theirs gets the descriptor of a stream."""

import signal
import subprocess
import sys

import pytest

STREAMS = (0, 1, 2)


def without(descriptors, command):
    """The command, for a process that begins without these descriptors. A shell closes
    them: with ``preexec_fn`` this process would be forked, which jax warns of."""
    closed = " ".join(f"{each}>&-" for each in descriptors)
    return ["sh", "-c", f'exec "$@" {closed}', "sh", *command]


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 2), STREAMS])
def test_a_loop_takes_no_descriptor_of_a_stream(closed):
    body = """
import os, subprocess, sys
from zstrat.transport import Portal

closed = [int(each) for each in sys.argv[1:]]
before = sys.stdin, sys.stdout, sys.stderr
assert [n for n in range(3) if before[n] is None] == closed
Portal("of a test").close()
for each in closed:
    assert os.path.sameopenfile(each, os.open(os.devnull, os.O_RDONLY))
# A process that is started has them, too.
look = "import os; [os.fstat(each) for each in range(3)]"
subprocess.run([sys.executable, "-c", look], check=True)
assert (sys.stdin, sys.stdout, sys.stderr) == before, "they are the program's"
"""
    command = [sys.executable, "-c", body, *map(str, closed)]
    done = subprocess.run(without(closed, command), timeout=60)
    assert done.returncode == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    "closed", [pytest.param((2,), marks=pytest.mark.thorough), STREAMS]
)
def test_a_program_with_a_cluster(closed, tmp_path):
    body = """
import sys
import numpy as np, zstrat as zs

with zs.LocalCluster(num_ps=1, num_workers=1) as cluster:
    strategy = zs.ParameterServerStrategy(cluster)
    with strategy.scope():
        w = zs.Variable(np.zeros(2, "float32"), name="w")
    step = zs.function(lambda: (print("said by a worker"), w.value())[1])
    value = zs.ClusterCoordinator(strategy).schedule(step).fetch()
with open(sys.argv[1], "w") as note:
    note.write(str(value))
"""
    note = tmp_path / "note"
    command = [sys.executable, "-c", body, str(note)]
    done = subprocess.run(without(closed, command), timeout=100)
    assert (done.returncode, note.read_text()) == (0, "[0. 0.]")


@pytest.mark.processes
def test_the_programs_of_zstrat(tmp_path):
    script, note = tmp_path / "script.py", tmp_path / "note"
    script.write_text(f"open({str(note)!r}, 'w').write('ran'); print('said')")
    command = [sys.executable, "-m", "zstrat.cli", "run", "-n", "1", str(script)]
    done = subprocess.run(without(STREAMS, command), timeout=100)
    assert (done.returncode, note.read_text()) == (0, "ran")

    command = [sys.executable, "-m", "zstrat.cli", "cluster"]
    with subprocess.Popen(
        without((0, 2), command), stdout=subprocess.PIPE, text=True
    ) as cluster:
        while "task=worker:0" not in cluster.stdout.readline():
            pass
        cluster.send_signal(signal.SIGINT)
        assert cluster.stdout.read() == "stopping all tasks\n"
    assert cluster.returncode == 0
