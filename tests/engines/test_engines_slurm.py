"""A fleet in a real Slurm: four nodes, of which each is an address of this machine."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from engines_ask import eventually, pid_of

ZSTRAT = (sys.executable, "-m", "zstrat.cli", "slurm")

TRAIN = """
import os, sys, time
import zstrat as zs

folder, runs = sys.argv[1], int(sys.argv[2])
strategy = zs.ParameterServerStrategy(
    zs.cluster_resolver.TFConfigClusterResolver(), on_ps_loss="restore"
)
coordinator = zs.ClusterCoordinator(strategy)
with strategy.scope():
    count = zs.Variable(0)
manager = zs.CheckpointManager(zs.Checkpoint(count=count), folder, max_to_keep=2)

@zs.function
def step():
    count.assign_add(1)

def run():
    coordinator.schedule(step)
    coordinator.join()
    if os.path.exists(folder + ".save"):
        os.remove(folder + ".save")
        manager.save()
    time.sleep(0.02)

with zs.PreemptionHandler(manager, strategy) as handler:
    print("begins at", handler.total_run_calls, int(count.numpy()), flush=True)
    while handler.total_run_calls < runs and not os.path.exists(folder + ".end"):
        handler.run(run)
        if handler.total_run_calls % 10 == 0:
            print("step", handler.total_run_calls, int(count.numpy()), flush=True)
print("ends at", int(count.numpy()) == handler.total_run_calls, flush=True)
"""


def submitted(slurm, name, *words, runs=100_000):
    """The number of a job that trains."""
    (slurm.folder / "train.py").write_text(TRAIN)
    said = slurm.run(
        *ZSTRAT,
        *words,
        f"--output={slurm.folder}/{name}.out",
        f"--dir={slurm.folder}/{name}.logs",
        "train.py",
        f"{slurm.folder}/{name}",
        runs,
    )
    return said.split()[-1]


def output(slurm, name):
    file = slurm.folder / f"{name}.out"
    return file.read_text() if file.exists() else ""


def steps(slurm, name):
    """How far it says that it is."""
    found = re.findall(r"^step (\d+)", output(slurm, name), re.MULTILINE)
    return int(found[-1]) if found else 0


def goes_on(slurm, name):
    there = steps(slurm, name)
    eventually(lambda: steps(slurm, name) > there + 20)


def log(slurm, name, task):
    return (slurm.folder / f"{name}.logs" / f"{task}.log").read_text()


def test_a_job_goes_on_when_tasks_are_killed_beside_another(slurm):
    one = submitted(slurm, "one", "--ps=1", "--workers=2", "--nodes=3")
    two = submitted(slurm, "two", "--ps=1", "--workers=1", "--nodes=2", runs=60)
    eventually(lambda: steps(slurm, "one") > 0)
    os.kill(pid_of(log(slurm, "one", "worker-0")), signal.SIGKILL)
    eventually(lambda: log(slurm, "one", "worker-0").count("ready at") == 2)
    goes_on(slurm, "one")
    (slurm.folder / "one.save").touch()
    eventually(lambda: list((slurm.folder / "one").glob("ckpt-*")))
    os.kill(pid_of(log(slurm, "one", "ps-0")), signal.SIGKILL)
    eventually(lambda: log(slurm, "one", "ps-0").count("ready at") == 2)
    goes_on(slurm, "one")
    eventually(lambda: slurm.state(two) == "COMPLETED")
    assert "ends at True" in output(slurm, "two")
    tasks = [("one", "ps-0"), ("one", "worker-0"), ("one", "worker-1")]
    pids = [pid_of(log(slurm, *task)) for task in tasks]
    (slurm.folder / "one.end").touch()
    eventually(lambda: slurm.state(one) == "COMPLETED")
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not list((slurm.folder / "one.logs").glob("keys"))


def test_a_job_that_is_preempted_goes_on_later(slurm):
    job = submitted(slurm, "low", "--ps=1", "--workers=1", "--nodes=2")
    eventually(lambda: steps(slurm, "low") > 20)
    words = ["--partition=high", "--nodes=4", "--exclusive", "--wrap=true"]
    slurm.run("sbatch", *words, "--output=/dev/null")
    eventually(lambda: slurm.state(job).startswith("PENDING"))
    # Slurm has it wait for two minutes. Who hastens it meets the end of its first run.
    eventually(lambda: slurm.state(job) == "RUNNING", 240.0)
    begins = r"^begins at (\d+) (\d+)"
    found = eventually(
        lambda: re.findall(begins, output(slurm, "low"), re.MULTILINE)[1:]
    )
    ((run, value),) = found
    assert run == value
    assert int(run) > 20
    assert f"saved after run {run}" in output(slurm, "low")
    (slurm.folder / "low.end").touch()
    eventually(lambda: slurm.state(job) == "COMPLETED")
    assert "ends at True" in output(slurm, "low")


def test_a_program_in_an_allocation(slurm):
    text = (
        "import zstrat as zs\n"
        "with zs.launch.slurm(num_ps=1, num_workers=1) as cluster:\n"
        "    strategy = zs.ParameterServerStrategy(\n"
        "        cluster.resolver, settings=cluster.settings)\n"
        "    with strategy.scope():\n"
        "        print('value', zs.Variable(7).numpy())\n"
        "zs.launch.slurm(num_ps=2, num_workers=2)\n"
    )
    (slurm.folder / "inside.py").write_text(text)
    ran = subprocess.run(
        ["salloc", "--quiet", "-n2", "-N2", sys.executable, "inside.py"],
        env=slurm.env,
        cwd=slurm.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "value 7" in ran.stdout, ran.stderr
    assert "2 task slots (n1: 1, n2: 1), but 2 ps and 2 workers need 4" in ran.stderr


@pytest.mark.parametrize(
    "words", ["--gres=gpu:4", "--gpus-per-node=4", "--gpus=4", "--nodelist=n2 --gpus=4"]
)
def test_workers_on_a_node_divide_its_gpus(slurm, words):
    slurm.env["JAX_PLATFORMS"] = ""
    counts = ["--ps=1", "--workers=2", "--nodes=1", *words.split()]
    job = submitted(slurm, "gpus", *counts, runs=1)
    eventually(lambda: slurm.state(job).split()[0] in ("COMPLETED", "FAILED"))
    assert "ends at True" in output(slurm, "gpus")
    for worker, gpus in enumerate(("0, 1", "2, 3")):
        words = f"worker {worker} of 2 on this host uses GPU {gpus}\n"
        assert words in log(slurm, "gpus", f"worker-{worker}")


def test_gpus_that_slurm_would_not_give_to_the_steps(slurm):
    counts = ["--ps=1", "--workers=3", "--nodes=2", "--gpus=8"]
    job = submitted(slurm, "many", *counts)
    eventually(lambda: slurm.state(job).startswith("FAILED"))
    assert "SLURM_GPUS=8: each task is a step" in output(slurm, "many")
    assert "--gpus-per-node=N" in output(slurm, "many")


def test_a_job_that_is_cancelled_leaves_nothing(slurm):
    job = submitted(slurm, "gone", "--ps=1", "--workers=1")
    eventually(lambda: steps(slurm, "gone") > 0)
    pids = [pid_of(log(slurm, "gone", task)) for task in ("ps-0", "worker-0")]
    slurm.run("scancel", job)
    eventually(lambda: slurm.state(job).startswith("CANCELLED"))
    eventually(lambda: not any(map(psutil.pid_exists, pids)))


def test_how_long_until_the_first_step(slurm, capsys):
    """Printed, not asserted: beside a job that does nothing, on the same nodes."""
    began = time.monotonic()
    job = slurm.run("sbatch", "-N2", "--wrap=srun true", "--output=/dev/null").split()
    eventually(lambda: slurm.state(job[-1]) == "COMPLETED")
    engine = time.monotonic() - began
    began = time.monotonic()
    job = [submitted(slurm, "timed", "--ps=1", "--workers=1", "--nodes=2", runs=10)]
    eventually(lambda: steps(slurm, "timed") > 0)
    took = time.monotonic() - began
    eventually(lambda: slurm.state(job[-1]) == "COMPLETED")
    with capsys.disabled():
        print(
            f"\nfirst steps after {took:.1f} s; a job of nothing takes {engine:.1f} s"
        )


@pytest.mark.parametrize("words", [["--mem=999T"], ["--partition=none"]])
def test_a_job_that_slurm_does_not_take(slurm, words):
    (slurm.folder / "train.py").touch()
    ran = subprocess.run(
        [*ZSTRAT, *words, "train.py"],
        env=slurm.env,
        cwd=slurm.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert "sbatch: error" in ran.stderr
