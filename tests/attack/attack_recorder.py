"""Real traffic, recorded between a program, its workers and its parameter servers."""

import threading

import numpy as np
from attack_fuzz import seed_of
from attack_peers import Cut
from attack_tasks import target

from zstrat.wire import Job


class Recorder(Cut):
    """Keeps what the clients said."""

    def __init__(self, address):
        self._said = {}
        self._lock = threading.Lock()
        super().__init__(address)

    def _up(self, here, there):
        said = bytearray()
        with self._lock:
            self._said[len(self._said)] = said
        try:
            while data := here.recv(65536):
                said += data
                there.sendall(data)
        except OSError:  # the task has hung up
            pass

    def seeds(self):
        return [seed for said in self._said.values() for seed in _parsed(bytes(said))]


def _parsed(said):
    """The messages behind a greeting of ZeroMQ, without chunks and beats."""
    at, message, found = 64, [], []
    while at + 2 <= len(said):
        flags = said[at]
        size = (
            int.from_bytes(said[at + 1 : at + 9], "big") if flags & 2 else said[at + 1]
        )
        at += 9 if flags & 2 else 2
        if flags & 4 or at + size > len(said):
            at += size
            continue
        message.append(said[at : at + size])
        at += size
        if not flags & 1:
            seed = seed_of(message[0], message[1:])
            found += [seed] if seed.header[1] else []
            message = []
    return found


def recorded(folder):
    """What a small training says: dense steps, rows, own updates, results."""
    import jax.numpy as jnp
    import optax

    import zstrat as zs

    with target(Job.PS, folder) as ps, target(Job.WORKER, folder) as worker:
        relays = Recorder(ps.address), Recorder(worker.address)
        try:
            spec = {"ps": [relays[0].address], "worker": [relays[1].address]}
            resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(spec))
            with zs.ParameterServerStrategy(resolver) as strategy:
                coordinator = zs.ClusterCoordinator(strategy)
                with strategy.scope():
                    dense = zs.Variable(np.ones((4, 4), np.float32), name="dense")
                    table = zs.Variable(np.ones((50, 4), np.float32), name="table")
                    optimizer = zs.Optimizer(optax.adam(0.1))

                @zs.function
                def step():
                    def loss(v, t):
                        rows = zs.embedding_lookup(t, jnp.array([1, 5, 5]))
                        return (rows @ v).sum()

                    value, grads = zs.value_and_grad(loss, (0, 1))(dense, table)
                    optimizer.apply_gradients(grads, (dense, table))
                    return value

                results = [coordinator.schedule(step) for _ in range(20)]
                coordinator.join()
                [result.fetch() for result in results]
                dense.assign_add(np.ones((4, 4), np.float32))
                dense.numpy()
        finally:
            for relay in relays:
                relay.close()
        return [seed for relay in relays for seed in relay.seeds()]
