"""A character-level transformer on four workers, behind a slow link to its server.

The program puts a link of 20 Mbit/s and 50 ms per round trip in front of the parameter
server, and trains twice with the same numbers of characters: with synchronous rounds,
which exchange the model at each step, and with local steps, which exchange it once in
20 (DiLoCo). It prints the loss by characters and by seconds, and the bytes on the link.

    python examples/diloco.py
    python examples/diloco.py --steps 400 --every 20 --fragments 4 --overlap 3
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time

import numpy as np
import optax
from char_transformer import CONTEXT, bits, init_params
from plain_texts import load_texts

import zstrat as zs


class SlowLink:
    """Forwards connections to ``target`` with a delay and a limit for each direction.

    All connections of one direction share its bandwidth. Runs on a thread of its own.
    """

    def __init__(self, target, bits_per_s, round_trip):
        self._target, self._rate, self._delay = target, bits_per_s / 8, round_trip / 2
        self._free = {"up": 0.0, "down": 0.0}
        self.nbytes = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        started = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        self.address = started.result(10)

    async def _start(self):
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _join(self, reader, writer):
        host, _, port = self._target.rpartition(":")
        source, sink = await asyncio.open_connection(host, int(port))
        await asyncio.gather(
            self._forward(reader, sink, "up"), self._forward(source, writer, "down")
        )

    async def _forward(self, reader, writer, way):
        """Reads a piece when the link is free, and writes it when it has arrived."""
        arrived = asyncio.Queue()
        deliver = asyncio.ensure_future(self._deliver(arrived, writer))
        try:
            while data := await reader.read(16384):
                self.nbytes += len(data)
                begins = max(self._loop.time(), self._free[way])
                self._free[way] = ends = begins + len(data) / self._rate
                arrived.put_nowait((ends + self._delay, data))
                await asyncio.sleep(ends - self._loop.time())
        except OSError:
            pass  # a connection that was reset has ended
        arrived.put_nowait((0.0, b""))
        await deliver

    async def _deliver(self, arrived, writer):
        while True:
            at, data = await arrived.get()
            if not data:
                break
            await asyncio.sleep(at - self._loop.time())
            writer.write(data)
        writer.close()


def train(options, text, *, every, steps):
    """Trains on a cluster behind a slow link; returns losses, seconds, and bytes."""
    with zs.LocalCluster(1, options.workers, transport="tcp") as cluster:
        jobs = cluster.spec.as_dict()
        link = SlowLink(jobs["ps"][0], options.megabits * 1e6, options.round_trip)
        spec = zs.ClusterSpec({**jobs, "ps": [link.address]})
        resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
        with zs.ParameterServerStrategy(resolver) as strategy:
            return run(strategy, link, options, text, every, steps)


def run(strategy, link, options, text, every, steps):
    workers = options.workers
    rounds = zs.Rounds(workers=workers)
    with strategy.scope():
        params = zs.create_variables(init_params(options.seed, options.layers))
        if every == 1:
            optimizer = zs.Optimizer(optax.adamw(options.rate), rounds=rounds)
        else:
            optimizer = zs.LocalOptimizer(
                optax.adamw(options.rate),
                optax.sgd(0.7, momentum=0.9, nesterov=True),
                every=every,
                fragments=options.fragments,
                overlap=options.overlap,
                rounds=rounds,
            )
    coordinator = zs.ClusterCoordinator(strategy)

    def train_step(iterator):
        loss, grads = zs.value_and_grad(bits)(params, next(iterator))
        optimizer.apply_gradients(grads, params)
        return loss

    def dataset_fn(context):
        random = np.random.default_rng([options.seed, context.input_pipeline_id])
        while True:
            starts = random.integers(0, len(text) - CONTEXT, (options.batch, 1))
            yield text[starts + np.arange(CONTEXT + 1)].astype(np.int32)

    step = zs.function(train_step) if every == 1 else optimizer.window(train_step)
    per_closure = 1 if every == 1 else every // options.fragments
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    losses, seconds, began, before = [], [], time.perf_counter(), link.nbytes
    for _ in range(steps // per_closure):
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(workers)]
        losses.append(float(np.mean([value.fetch() for value in values])))
        seconds.append(time.perf_counter() - began)
    coordinator.join()
    return per_closure, losses, seconds, link.nbytes - before


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=4)
    add("--steps", type=int, default=200, help="of each worker")
    add("--every", type=int, default=20, help="steps between two exchanges")
    add("--fragments", type=int, default=1)
    add("--overlap", type=int, default=0)
    add("--batch", type=int, default=4, help="windows of text, of each worker")
    add("--rate", type=float, default=3e-3, help="learning rate of AdamW")
    add("--layers", type=int, default=1, help="blocks of the model")
    add("--megabits", type=float, default=20.0, help="per second, each way")
    add("--round-trip", type=float, default=0.05, help="seconds")
    add("--alone", action="store_true", help="without the synchronous run")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = arguments()
    text, _ = load_texts()
    found = {}
    for every in (options.every,) if options.alone else (options.every, 1):
        name = "synchronous rounds" if every == 1 else f"local steps, every {every}"
        made = train(options, text, every=every, steps=options.steps)
        steps, losses, seconds, nbytes = found[every] = made
        characters = steps * options.workers * options.batch * CONTEXT
        print(name)
        for number in range(0, len(losses), max(1, len(losses) // 10)):
            print(
                f"  {(number + 1) * characters:>9,} characters  "
                f"{seconds[number]:6.1f} s  {losses[number]:.3f} bits per character"
            )
        print(f"  in all {seconds[-1]:.1f} s, {nbytes / 1e6:.1f} MB on the link")
    if not options.alone:
        local, rounds = found[options.every], found[1]
        print(
            f"local steps: {rounds[2][-1] / local[2][-1]:.1f} times as fast, "
            f"{rounds[3] / local[3]:.1f} times fewer bytes"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
