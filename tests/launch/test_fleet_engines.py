"""Fleets by ssh and by Slurm, with programs in their place that run on this machine
what they are told to: real daemons, real keys, real ends. What real engines do besides
is in tests/engines."""

import asyncio
import os
import select
import shlex
import signal
import stat
import subprocess
import sys

import psutil
import pytest
from click.testing import CliRunner

from zstrat.cli import main
from zstrat.config import Settings, Timeouts
from zstrat.errors import UnavailableError, VersionMismatchError, ZstratError
from zstrat.launch import Observer, ssh
from zstrat.launch.fleet import Allocation, FleetTask
from zstrat.launch.fleet.hosts import hosts_of

SSH = """#!/bin/sh
# Hosts are what their names say.
for word; do last=$word; [ "$word" = -G ] && asks=1; done
if [ "$asks" ]; then echo user me; echo hostname 127.0.0.1; exit; fi
while [ "$1" != -- ]; do shift; done
echo "$$ $*" >> "$0.said"
case $2 in
  off*) echo "ssh: connect to host $2 port 22: Connection refused" >&2; exit 255 ;;
  old*) echo 'Welcome to this host!'
    echo '{"protocol": 1, "versions": {"zstrat": "0.0.1", "python": "3.9.2"}}'
    cat > "$0.got"; exit 2 ;;
  beat*) last=$(echo "$last" | sed "s:-m zstrat.daemons.launched:$0.py:")
    exec /bin/sh -c "$last" ;;
  cut*) cat | HOME=/nonexistent /bin/sh -c "$last" ;;
  *) HOME=/nonexistent exec /bin/sh -c "$last" ;;
esac
"""

SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -w ] && shift; shift; done
exec "$@"
"""

SCONTROL = """#!/bin/sh
case $1 in
  show) echo "NodeName=n1 NodeAddr=127.0.0.1 Port=7"; echo "NodeName=n2" ;;
  requeue) echo "$2" >> "$0.said" ;;
esac
"""

QUICK = Settings(Timeouts(connect=120.0, drain=20.0))


def program(folder, name, text):
    file = folder / name
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.fixture
def fake_ssh(tmp_path):
    return program(tmp_path, "ssh", SSH)


def incarnation(fleet):
    """Of the only ps, once it answers."""

    async def ask():
        async with Observer(fleet.spec, fleet.settings) as observer:
            (seen,) = await observer.inspect(60.0)
            assert not seen.problem, fleet.log("ps:0")
            return seen.values["task"]["incarnation"]

    return asyncio.run(ask())


def descendants():
    return psutil.Process().children(recursive=True)


def test_a_ps_behind_ssh_comes_back_and_ends(fake_ssh):
    before = set(descendants())
    with ssh(["a"], 1, 0, program=str(fake_ssh), settings=QUICK) as fleet:
        first = incarnation(fleet)
        address = fleet.spec.task_address("ps", 0)
        secret = (fleet.keys / "ps.secret").read_text().strip()
        (daemon,) = [
            process
            for process in set(descendants()) - before
            if "zstrat.daemons.launched" in process.cmdline()
        ]
        assert not any(secret in word for p in descendants() for word in p.cmdline())
        assert secret not in fake_ssh.with_suffix(".said").read_text()
        assert secret not in " ".join(daemon.environ().values())
        end = os.pidfd_open(daemon.pid)  # who started it reaps it
        daemon.kill()
        assert select.select([end], [], [], 60)[0]
        os.close(end)
        again = incarnation(fleet)
        assert again != first, fleet.log("ps:0")
        assert fleet.spec.task_address("ps", 0) == address
        assert fleet.attempt("ps:0") == 2
        assert "ready at" in fleet.log("ps:0")
        keys = fleet.keys
    assert not keys.exists()
    assert not set(descendants()) - before
    assert fleet.failures == ("ps:0",)


BEATEN = """
import json, os, sys
from zstrat.transport import hello
me = hello("ps", 0, 1)
os.write(1, json.dumps({"protocol": me.protocol, "versions": me.versions}).encode())
os.write(1, b"\\n")
said = [os.read(0, 65536) for _ in range(4)]
assert b"keys" in said[0] and b"".join(said[1:]).strip() == b"", said[1:]
os.write(1, json.dumps({"address": "127.0.0.1:7"}).encode() + b"\\n")
sys.stdin.buffer.read()
"""


def test_a_daemon_hears_of_us_again_and_again(fake_ssh, tmp_path):
    program(tmp_path, "ssh.py", BEATEN)
    settings = Settings(Timeouts(connect=120.0, launcher=1.0))
    with ssh(["beat1"], 1, 0, program=str(fake_ssh), settings=settings) as fleet:
        assert fleet.is_running("ps:0")


def test_a_daemon_that_is_cut_off_ends_and_comes_back(fake_ssh):
    """What lies between passes nothing on any more, and nobody is told."""
    before, settings = (
        set(descendants()),
        Settings(Timeouts(connect=120.0, launcher=2.0)),
    )
    with ssh(["cut1"], 1, 0, program=str(fake_ssh), settings=settings) as fleet:
        first = incarnation(fleet)
        found = {
            process.name(): process
            for process in set(descendants()) - before
            if "zstrat.daemons.launched" in process.cmdline() or process.name() == "cat"
        }
        line = found.pop("cat")
        (daemon,) = found.values()
        end = os.pidfd_open(daemon.pid)
        line.suspend()
        assert select.select([end], [], [], 60)[0], fleet.log("ps:0")
        os.close(end)
        assert "no heartbeat from the launching program for 2 s" in fleet.log("ps:0")
        line.resume()
        assert incarnation(fleet) != first
        assert fleet.attempt("ps:0") == 2
    assert not set(descendants()) - before


def test_workers_on_one_host_divide_its_gpus(fake_ssh, tmp_path):
    file = tmp_path / "hosts.toml"
    file.write_text("ps = 1\n[hosts.a]\nworkers = 2\ngpus = [4, 5, 6, 7]\n")
    env = {"JAX_PLATFORMS": ""}
    with ssh(file, program=str(fake_ssh), env=env, settings=QUICK) as fleet:
        said = [fleet.log(task) for task in fleet.tasks]
    assert "on this host uses" not in said[0]
    assert "worker 0 of 2 on this host uses GPU 4, 5\n" in said[1]
    assert "worker 1 of 2 on this host uses GPU 6, 7\n" in said[2]


@pytest.mark.parametrize(
    ("hosts", "kind", "words"),
    [
        (["off1"], UnavailableError, "ps:0"),
        (["old1"], VersionMismatchError, r"\b1\b.*\b0\b.*\b0\b"),
    ],
)
def test_a_host_that_will_not_do(fake_ssh, hosts, kind, words):
    before = set(descendants())
    with pytest.raises(kind, match=words) as caught:
        ssh(hosts, 1, 0, program=str(fake_ssh), settings=QUICK)
    assert "last lines of" in str(caught.value)
    assert not set(descendants()) - before
    got = fake_ssh.with_suffix(".got")
    assert not got.exists() or not got.read_text()  # no keys to who does not suit


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/nowhere/python", "`python`"),
        ("/bin/false", r"\b1\b"),
    ],
)
def test_a_host_without_zstrat(fake_ssh, tmp_path, python, words):
    file = tmp_path / "hosts.toml"
    file.write_text(f'ps = 1\nworkers = 0\npython = "{python}"\n[hosts.a]\n')
    with pytest.raises(ZstratError, match=words):
        ssh(file, program=str(fake_ssh), settings=QUICK)


def test_no_ssh_at_all():
    with pytest.raises(UnavailableError, match="'no-such-ssh'"):
        ssh(["a"], 1, 0, program="no-such-ssh")


def test_hosts_of_a_file(tmp_path):
    file = tmp_path / "hosts.toml"
    file.write_text(
        'ps = 2\nworkers = 3\nuser = "me"\noptions = ["ProxyJump=gate"]\n'
        '[hosts.big]\njobs = ["ps"]\n[hosts.a]\nport = 2222\nuser = "you"\n[hosts.b]\n'
    )
    found = hosts_of(file)
    assert [host.options_of_ssh() for host in found.hosts[:2]] == [
        ["-l", "me", "-o", "ProxyJump=gate"],
        ["-l", "you", "-p", "2222", "-o", "ProxyJump=gate"],
    ]
    assert found.tasks(None, None) == [
        FleetTask("ps", 0, "big"),
        FleetTask("ps", 1, "a"),
        FleetTask("worker", 0, "a"),
        FleetTask("worker", 1, "b"),
        FleetTask("worker", 2, "a"),
    ]
    assert len(found.tasks(1, 0)) == 1


def test_hosts_that_say_how_many_tasks_they_have_and_where_these_listen(tmp_path):
    file = tmp_path / "hosts.toml"
    own = '[hosts.big]\nworkers = 2\nports = "7000-7002"\n'
    file.write_text(f"ps = 1\nworkers = 5\n{own}[hosts.a]\n[hosts.b]\nworkers = 0\n")
    assert hosts_of(file).tasks(None, None) == [
        FleetTask("ps", 0, "big", 7000),
        FleetTask("worker", 0, "big", 7001),
        FleetTask("worker", 1, "big", 7002),
        FleetTask("worker", 2, "a"),
        FleetTask("worker", 3, "a"),
        FleetTask("worker", 4, "a"),
    ]
    file.write_text(f"{own}[hosts.a]\nps = 1\nworkers = 1\n")  # the sums will do
    tasks = hosts_of(file).tasks(None, None)
    assert [(task.name, task.where) for task in tasks] == [
        ("ps:0", "a"),
        ("worker:0", "big"),
        ("worker:1", "big"),
        ("worker:2", "a"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ps = 1", r"expected a table for each host, such as \[hosts.node1\]"),
        ("[hosts.a]\nadress = 1", "did you mean 'address'"),
        ("workrs = 1\n[hosts.a]", "did you mean 'workers'"),
        ("ps = 1\n[host.a]", r"'host'.*\[hosts.node1\]"),
        ('[hosts.a]\nport = "22"', "expected a number"),
        ('[hosts."-oProxyCommand=x"]', "oProxyCommand="),
        ('[hosts.a]\njobs = ["chief"]', "jobs of a"),
        ('[hosts.a]\naddress = "10.0.0.3:22"', r"\b10\b.*\b0\b.*\b0\b"),
        ('[hosts.a]\naddress = "10.0.0.3 "', r"\b10\b.*\b0\b.*\b0\b"),
        ("[hosts.a]\nport = true", "port = True: expected a number"),
        ("[hosts.a]\nport = 65536", r"\b65536\b.*\b1\b"),
        ("ps = true\n[hosts.a]", "ps = True: expected a number"),
        ("ps = 1000000000000\nworkers = 0\n[hosts.a]", r"\b65536\b"),
        ('[hosts.a]\npython = "~/bin/python"', r"'\~/bin/python'"),
        ('[hosts.a]\npython = ""', "PATH"),
        ('ps = "two"\n[hosts.a]', "'two'"),
        ("[hosts.a]\ngpus = 2", r"\b2\b"),
        ("[hosts.a]\ngpus = [1, 1]", "GPU"),
        ('[hosts.a]\ngpus = ["all"]', "GPU"),
        ("workers = 1\n[hosts.a]", "num_ps="),
        ("ps = 1\n[hosts.a]\nworkers = -2", r"\b2\b.*\b0\b"),
        ('[hosts.a]\nps = 1\njobs = ["worker"]', r"\b1\b.*\['worker'\]"),
        ('[hosts.a]\nports = "70-"', "'70-'"),
        ('[hosts.a]\nports = "9-7"', "'9-7'"),
        ('[hosts.a]\nports = "x"', "'x'"),
        ('ps = 2\nworkers = 1\nports = "7-8"\n[hosts.a]', r"\b3\b"),
        ("ps = 1\nworkers = 1\n[hosts.a]\nworkers = 2", r"\b2\b.*\b2\b"),
        ("ps = 1\nworkers = 3\n[hosts.a]\nworkers = 2", r"\b1\b.*\b3\b"),
        ('ps = 1\nworkers = 1\n[hosts.a]\njobs = ["ps"]', "'worker'"),
    ],
)
def test_a_file_of_hosts_that_cannot_be(tmp_path, text, words):
    file = tmp_path / "hosts.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        hosts_of(file).tasks(None, None)


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2,1",
}


def test_who_runs_where_in_an_allocation():
    assert Allocation.of(JOB).tasks(1, 2) == [
        FleetTask("ps", 0, "n1"),
        FleetTask("worker", 0, "n2"),
        FleetTask("worker", 1, "n1"),
    ]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({}, "SLURM_JOB_ID"),
        ({**JOB, "SLURM_GPUS_PER_TASK": "1"}, "GPUS_PER_TASK=1: .*--gpus-per-node=N"),
        ({**JOB, "SLURM_GPUS": "8"}, r"\b7\b.*SLURM_GPUS=8"),
        (JOB, r"\b3\b.*\b2\b.*\b1\b"),
    ],
)
def test_an_allocation_that_will_not_do(env, words):
    with pytest.raises(ValueError, match=words):
        Allocation.of(env).tasks(2, 2)


def test_the_batch_script_of_a_program(tmp_path):
    (tmp_path / "a b").mkdir()
    file = program(tmp_path / "a b", "t.py", "")
    words = ["slurm", "--print", "--workers=2", "-pgpu", str(file), "x y"]
    ran = CliRunner().invoke(main, words)
    first, *options, command = ran.output.splitlines()
    assert first == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH ") for line in options] == [
        "--ntasks=3",
        "--job-name=t.py",
        "--signal=B:USR1@60",
        "--requeue",
        "--open-mode=append",
        "-pgpu",
    ]
    us = ["exec", sys.executable, "-P", "-m", "zstrat.cli", "slurm", "--here"]
    asked = ["--ps=1", "--workers=2", str(file), "x y"]
    assert shlex.split(command) == [*us, *asked]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "gpu", "t.py"], "as one word: -pgpu"),
        (["--partition", "gpu", "t.py"], "as one word: --partition=gpu"),
        (["--here", "--time=1", __file__], "no effect with --here"),
        (["no.py"], "program 'no.py' does not exist\n"),
        (["--print", "-pgpu", "no.py"], "program 'no.py' does not exist\n"),
        (["--time=1"], "expected a program after the options"),
        (["--gpus-per-task=1", __file__], "--gpus-per-task=1: each task is"),
    ],
)
def test_words_that_zstrat_slurm_does_not_take(words, said):
    ran = CliRunner().invoke(main, ["slurm", *words])
    assert ran.exit_code == 2
    assert said in ran.output


def test_nothing_breaks_out_of_its_line_of_the_batch_script(tmp_path):
    good, evil = (program(tmp_path, name, "") for name in ("t.py", "t\ntouch x #.py"))
    for words in (["--job-name=evil\ntouch PWNED", str(good)], [str(evil)]):
        ran = CliRunner().invoke(main, ["slurm", "--print", *words])
        assert ran.exit_code == 2
        assert "has a character that is not printable" in ran.output
    ran = CliRunner().invoke(main, ["slurm", "--print", str(good), "a\nb"])
    assert shlex.split(ran.output.split("exec ")[1])[-1] == "a\nb"


PREEMPTED = """
import os, signal, sys
sys.path.append(sys.argv[1])
def end(number, frame):
    print("signalled", flush=True)
    raise SystemExit(75)
signal.signal(signal.SIGUSR1, end)
print(os.environ["TF_CONFIG"], os.listdir(os.environ["ZSTRAT_KEYS"]), flush=True)
os.kill(os.getppid(), signal.SIGUSR1)
signal.pause()
"""


def test_a_job_that_is_preempted_is_queued_again(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        program(tmp_path, name, text)
    script = program(tmp_path, "train.py", PREEMPTED)
    env = {**os.environ, **JOB, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "zstrat.cli", "slurm", "--here", "--workers=0"]
    ran = subprocess.run(
        [*command, str(script), "/x"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 75, ran.stderr
    assert "signalled" in ran.stdout
    assert "chief.secret" in ran.stdout
    assert (tmp_path / "scontrol.said").read_text() == "7\n"


def test_a_program_that_is_killed_takes_its_fleet_along(fake_ssh, tmp_path):
    text = (
        "import os, signal, sys\n"
        "from zstrat.launch import ssh\n"
        "fleet = ssh(['a'], 1, 0, program=sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    script = program(tmp_path, "train.py", text)
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(script), str(fake_ssh)], env=env, check=False, timeout=300
    )
    assert ran.returncode == -signal.SIGKILL
    pid = int(fake_ssh.with_suffix(".said").read_text().split()[0])
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(60)
