"""Servers inside this process, with TensorFlow's rules about who they are."""

import asyncio
import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from zstrat.cluster import ClusterSpec
from zstrat.config import Settings
from zstrat.launch import Server, ServerDef, observe
from zstrat.transport import Link, hello, new_incarnation, run
from zstrat.wire import CloseSession, OpenSession

ONE = {"ps": ["127.0.0.1:0"]}
TWO = {"ps": ["127.0.0.1:1", "127.0.0.1:2"], "worker": ["127.0.0.1:3"]}


def seen(address):
    """What the only parameter server, at this address, says of itself."""
    tasks = [address] if isinstance(address, str) else address
    (status,) = run(observe(ClusterSpec({"ps": tasks}), Settings(), 30))
    assert status.problem == ""
    return status


@pytest.mark.shows("tf.distribute.Server", "Server.join")
def test_serves_until_it_is_stopped():
    with Server(ONE) as server:
        assert server.target.startswith("tcp://127.0.0.1:")
        address = server.target.removeprefix("tcp://")
        assert seen(address).text("task", "job") == "ps"
        joining = threading.Thread(target=server.join)
        joining.start()
        server.stop()
        joining.join(100)
        assert not joining.is_alive()
    server.stop()


def test_an_index_of_numpy_is_a_number():
    """Its hello could not be sent: the program waited for it in vain."""
    with Server({"ps": ["127.0.0.1:1", "127.0.0.1:0"]}, "ps", np.int64(1)) as server:
        address = server.target.removeprefix("tcp://")
        seen({1: address})


ENDED = """
import os, signal, sys
from zstrat.launch import Server

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who runs the tests may ignore it: nohup
server = Server({"ps": ["127.0.0.1:0"]})
stop = server.stop
server.stop = lambda: (stop(), print("drained", flush=True))
if sys.argv[2] == "joins":
    # As a signal that comes while it waits: the handler runs in the main thread.
    thread = server._run.thread
    thread.join = lambda join=thread.join: (
        os.kill(os.getpid(), getattr(signal, sys.argv[1])), join())
    server.join()
    print("behind")
else:
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    print("not reached", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "then", "code", "words"),
    [
        ("SIGHUP", "works", -1, "drained\n"),
        ("SIGTERM", "joins", 0, "behind\ndrained\n"),
    ],
)
def test_signals_drain_it(number, then, code, words):
    program = [sys.executable, "-c", ENDED, number, then]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, words)


def test_starts_later():
    server = Server(ONE, start=False)
    assert server.target == "tcp://127.0.0.1:0"
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        server.join()
    server.stop()
    server.start()
    server.start()
    server.stop()


def test_a_stopped_server_serves_again():
    """It returned as if it served."""
    with Server(ONE) as server:
        server.stop()
        server.start()
        seen(server.target.removeprefix("tcp://"))


@pytest.mark.shows("Server")
def test_local_server_is_a_worker():
    server = Server.create_local_server()
    assert (server.server_def.job_name, server.server_def.task_index) == ("worker", 0)
    server.stop()


def test_coordinator_shuts_it_down():
    server = Server(ONE)

    async def close():
        me = hello("chief", 0, new_incarnation())
        address = server.target.removeprefix("tcp://")
        link = Link(address, me, name="ps:0", settings=Settings())
        link.start()
        session = me.incarnation
        try:
            await link.wait_open(asyncio.get_running_loop().time() + 30)
            await link.request(OpenSession(session, 0, 1, []))
            await link.request(CloseSession(session, exit=True))
        finally:
            await link.close()

    run(close())
    server.join()


def test_port_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match=address):
            Server({"ps": [address]})
        server = Server({"ps": [address]}, start=False)
        for _ in range(2):
            with pytest.raises(OSError, match=address):
                server.start()
    server.start()  # it was free in the end
    assert server.target == f"tcp://{address}"
    server.stop()


def definition(*args, **kwargs):
    return Server(*args, **kwargs, start=False).server_def


@pytest.mark.shows("Server(job_name=, task_index=, protocol=)")
def test_which_task():
    assert definition(TWO, "ps", 1).address == "127.0.0.1:2"
    assert definition(TWO, "worker").task_index == 0
    assert definition(ClusterSpec(TWO), "ps", 0, "grpc").protocol == "grpc"
    given = ServerDef(ClusterSpec(TWO), "ps", 0)
    assert definition(given) == given
    assert definition(given, task_index=1).task_index == 1
    assert definition(given, job_name="worker").job_name == "worker"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((TWO,), "`job_name`"),
        ((TWO, "ps"), "`task_index`"),
        ((TWO, "ps", 7), r"\b7\b"),
        ((TWO, "chief", 0), "chief"),
        ((TWO, "ps", 0, "carrier pigeon"), "protocol="),
    ],
)
def test_unclear_which_task(args, words):
    with pytest.raises(ValueError, match=words):
        definition(*args)


def test_what_is_no_cluster_or_no_server():
    with pytest.raises(TypeError):
        definition(7, "ps", 0)
    with pytest.raises(ValueError, match="'chief'"):
        Server({"chief": ["127.0.0.1:0"]})


def test_target_says_the_protocol_that_was_asked_for():
    server = Server(TWO, "ps", 0, protocol="grpc", start=False)
    assert server.target == "grpc://127.0.0.1:1"


PROGRAM = """\
import numpy as np, optax
import zstrat as zs

ps = zs.Server({"ps": ["127.0.0.1:0"]})
worker = zs.Server.create_local_server()
cluster = {"ps": [ps.target[6:]], "worker": [worker.target[6:]]}
resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(cluster))
strategy = zs.ParameterServerStrategy(resolver)
coordinator = zs.ClusterCoordinator(strategy)


class Trainer:
    def __init__(self):
        with strategy.scope():
            self.v = zs.Variable(np.zeros(2_000_000, "f4"))
            self.optimizer = zs.Optimizer(optax.adam(0.1))

    @zs.function
    def step(self, x):
        self.optimizer.apply_gradients([(self.v.value() + x.sum(), self.v)])
        return x.sum()


for _ in range(2):
    trainer = Trainer()
    print(coordinator.schedule(trainer.step, args=(np.ones(1, "f4"),)).fetch())
for size in range(2, 9):
    coordinator.schedule(trainer.step, args=(np.ones(size, "f4"),))
"""


@pytest.mark.processes
def test_a_program_with_its_own_servers_makes_instances_and_ends_amid_work(tmp_path):
    """Its classes stay its own, though the worker in it unpickles them; and its threads
    end before the interpreter does, which would abort it amid what jax compiles."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout.split() == ["1.0", "1.0"], done.stderr
    assert done.returncode == 0, done.stderr
