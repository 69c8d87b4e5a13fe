"""Real engines on this machine: ssh servers and a Slurm of four nodes on loopback
addresses, started for the tests and ended with them. What is not installed is skipped
by name; `make test-engines` installs it with INSTALL=1."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines_ask import eventually

from zstrat.cluster import free_ports

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("engines")
            item.add_marker(pytest.mark.timeout(400))


def needed(*programs):
    """Where they are; the test is skipped if one is not there."""
    found = {name: shutil.which(name, path=PATH) for name in programs}
    missing = [name for name, place in found.items() if place is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return {name: str(place) for name, place in found.items()}


@pytest.fixture
def folder():
    """Which others can enter: daemons of engines insist on it."""
    with tempfile.TemporaryDirectory(prefix="engines-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def ssh_settings(folder, port, addresses):
    """Writes ssh.conf of a client that gets to node1, node2, ... at the addresses;
    returns the words that start a server for it."""
    programs = needed("sshd", "ssh", "ssh-keygen")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for key in ("host", "id"):
        words = [programs["ssh-keygen"], "-q", "-t", "ed25519", "-N", ""]
        subprocess.run([*words, "-f", folder / key], check=True)
    shutil.copy(folder / "id.pub", folder / "authorized")
    server = folder / "sshd.conf"
    server.write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPort {port}\n"
    )
    nodes = enumerate(addresses, start=1)
    (folder / "ssh.conf").write_text(
        f"Host *\n  User {getpass.getuser()}\n  Port {port}\n  LogLevel ERROR\n"
        f"  IdentityFile {folder}/id\n  UserKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking no\n"
        + "".join(f"Host node{node}\n  HostName {at}\n" for node, at in nodes)
    )
    return [programs["sshd"], "-D", "-e", "-f", str(server)]


@pytest.fixture
def ssh_config(folder):
    """Of a client that gets to node1, node2, node3: an ssh server for each."""
    if not Path("/proc/net").exists():
        pytest.skip("needs the loopback addresses of Linux")
    (port,) = free_ports(1)
    addresses = [f"127.0.1.{node}" for node in range(1, 4)]
    words = ssh_settings(folder, port, addresses)
    servers = [
        subprocess.Popen(
            [*words, "-o", f"ListenAddress={at}"], stderr=subprocess.DEVNULL
        )
        for at in addresses
    ]
    client = folder / "ssh.conf"
    words = ["ssh", "-F", str(client), "-o", "BatchMode=yes", "node3", "true"]
    eventually(lambda: subprocess.run(words, check=False).returncode == 0)
    yield client
    for each in servers:
        each.terminate()
        each.wait()


@dataclass(frozen=True)
class Slurm:
    """A cluster of four nodes with a partition that is preempted, and one that does."""

    folder: Path
    env: dict[str, str]

    def run(self, *words):
        """What a command of Slurm says."""
        done = subprocess.run(
            [str(word) for word in words],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job):
        """As in RUNNING; with the reason, as in PENDING BeginTime."""
        line = self.run("scontrol", "show", "job", job, "--oneliner")
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        return f"{facts['JobState']} {facts['Reason']}".removesuffix(" None")


CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=10
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
PartitionName=low Nodes=n[1-4] Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n[1-4] PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName=n{n} NodeAddr=127.0.1.{n} NodeHostname=localhost Port={port} CPUs=8"
    " Gres=gpu:4\n"
)


@pytest.fixture
def slurm(folder):
    programs = needed("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")
    if os.geteuid() != 0:
        pytest.skip("slurmd and munged of the test run as root")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
    names = ("socket", "key", "pid", "log", "seed")
    options = [f"--{f}={folder}/munge.{n}" for f, n in zip(files, names, strict=True)]
    ports = free_ports(5)
    text = CONF.format(folder=folder, port=ports[0])
    nodes = [NODE.format(n=n, port=ports[n]) for n in range(1, 5)]
    first, last = text.split("PartitionName", 1)
    conf = folder / "slurm.conf"
    conf.write_text(f"{first}{''.join(nodes)}PartitionName{last}")
    for gpu in range(4):  # Slurm takes nothing but devices: these are /dev/null
        os.mknod(folder / f"gpu{gpu}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": PATH}
    daemons = [[programs["slurmctld"], "-D"]]
    daemons += [[programs["slurmd"], "-D", "-N", f"n{n}"] for n in range(1, 5)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    with contextlib.ExitStack() as stack:
        munged = subprocess.Popen(
            [programs["munged"], "-F", "--force", *options], **quiet
        )
        stack.callback(_end, munged)
        eventually((folder / "munge.socket").exists)
        for words in daemons:
            stack.callback(_end, subprocess.Popen(words, **quiet))
        made = Slurm(folder, env)
        eventually(lambda: _idle(env) == 4)
        yield made
        subprocess.run(["scancel", "--full", "-u", "root"], env=env, check=False)
        squeue = ["squeue", "--noheader"]
        eventually(lambda: not made.run(*squeue).strip())


def _end(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _idle(env):
    asked = ["sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D"]
    done = subprocess.run(asked, env=env, capture_output=True, text=True, check=False)
    return int(done.stdout.strip() or 0) if done.returncode == 0 else 0
