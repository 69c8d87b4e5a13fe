"""A blocking call where an event loop runs works, and says once what to await."""

import json
import os

PROGRAM = """
import asyncio, os, sys, threading, warnings
import numpy as np, optax, zstrat as zs

folder = sys.argv[1]
gate = f"{folder}/gate"
os.mkfifo(gate)
strategy = zs.ParameterServerStrategy()
with strategy.scope():
    w = zs.Variable(np.zeros((3, 2), "float32"), name="w")
    optimizer = zs.Optimizer(optax.sgd(1.0))
checkpoint = zs.Checkpoint(w=w)
coordinator = zs.ClusterCoordinator(strategy)
ones = np.ones((3, 2), "float32")
row = zs.IndexedSlices(ones[:1], [0], (3, 2))

@zs.function(eager=True)
def gated():
    open(gate).close()

def open_gate():
    open(gate, "w").close()  # blocks until the step is there

def said(call, shown=lambda: None):
    told = []
    def show(message, category, filename, *rest):
        if category is RuntimeWarning:
            assert filename == "<string>", filename
            told.append(str(message))
            shown()
    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = show
        call()
    return told

def fetch():
    coordinator.schedule(gated).fetch()

def join():
    coordinator.schedule(gated)
    coordinator.join()

async def main():
    for call, twin in (
        (w.numpy, "read_value_async"),
        (lambda: w.sparse_read([0]), "sparse_read_async"),
        (lambda: w.assign(ones), "assign_async"),
        (lambda: w.assign_add(ones), "assign_add_async"),
        (lambda: w.scatter_add(row), "scatter_async"),
        (lambda: optimizer.apply_gradients([(ones, w)]), "apply_gradients_async"),
        (lambda: checkpoint.write(f"{folder}/ckpt"), "write_async"),
    ):
        (told,) = said(call)
        assert twin in told, (twin, told)
        assert not said(call), "once"
    for call, twin in ((fetch, "remote value"), (join, "zs.AsyncClusterCoordinator")):
        # The step ends when the warning is there, so that the call has to wait.
        (told,) = said(call, open_gate)
        assert twin in told, (twin, told)
        threading.Thread(target=open_gate).start()
        assert not said(call), "once"
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        await w.assign_sub_async(ones)
        await asyncio.to_thread(w.assign_sub, ones)
    assert said(lambda: w.assign_sub(ones))

assert not said(w.numpy), "no loop runs"
asyncio.run(main())
strategy.close()
"""


def test_the_awaited_form_is_named_once(daemons, programs, tmp_path):
    config = json.dumps({"cluster": daemons.spec.as_dict()})
    env = {**os.environ, "TF_CONFIG": config}
    done = programs.run(["-c", PROGRAM, str(tmp_path)], env=env, timeout=100)
    assert done.returncode == 0
