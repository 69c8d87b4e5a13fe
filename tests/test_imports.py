"""What the import of a package brings with it, and what it leaves to the program."""

from __future__ import annotations

import subprocess
import sys

from test_architecture import JAX_AT_IMPORT, PACKAGES

LIGHT = {
    "zstrat": ("jax", "zmq", "msgpack", "numpy"),
    "zstrat.initializers": ("jax", "zmq", "msgpack"),
    "zstrat.wire": ("jax", "zmq"),
    "zstrat.cluster": ("jax", "zmq"),
    "zstrat.checkpoint": ("jax", "zmq"),
    "zstrat.tpu": ("jax", "zmq"),
    "zstrat.compat": ("jax", "zmq"),
    "zstrat.transport": ("jax",),
    "zstrat.data": ("jax",),
    "zstrat.ps": ("jax", "optax"),
    "zstrat.daemons.ps": ("jax", "optax", "cloudpickle", "click", "rich"),
    "zstrat.daemons.worker": ("jax", "click", "rich"),
    "zstrat.launch": ("jax",),
    "zstrat.cli": ("jax",),
    "zstrat.testing": ("jax",),
}
"""What the import of a package must not bring. One process imports all of them in this
order: what is not there after the last brings none of it by itself either."""


def test_import_stays_light() -> None:
    program = f"""
import importlib, sys
for module, absent in {LIGHT}.items():
    importlib.import_module(module)
    for name in absent:
        if name in sys.modules:
            print(f"after {{module}}, {{name}} is there")
"""
    assert printed(program) == ""


def printed(program: str) -> str:
    """By a process of its own, that ends well."""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_import_leaves_the_choice_of_devices_to_the_program() -> None:
    """jax refuses a number of devices once it has found some: who did that is named."""
    program = f"""
import importlib
for count, module in enumerate({sorted(JAX_AT_IMPORT)}, start=2):
    importlib.import_module(module)
    import jax
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        print(f"after {{module}}: {{error}}")
print(jax.device_count())
"""
    assert printed(program).split() == [str(1 + len(JAX_AT_IMPORT))]


def test_names_that_are_fetched_late_are_those_of_the_door() -> None:
    """By ``import *``, by ``dir``, from many threads at once, and pickled."""
    assert printed(_LATE) == ""


_LATE = """
import importlib, pickle, threading
for door in (
    "zstrat.cluster",
    "zstrat.collectives",
    "zstrat.daemons",
    "zstrat.launch",
    "zstrat.ps",
    "zstrat.ps.store",
    "zstrat.strategy",
):
    package, found, begin = importlib.import_module(door), [], threading.Barrier(8)
    def take():
        begin.wait()
        found.append([getattr(package, name) for name in package.__all__])
    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    if len(found) != 8 or any(each != found[0] for each in found):
        print(door, "gave threads other things")
    names = {}
    exec(f"from {door} import *", names)
    if not set(package.__all__) <= set(names) & set(dir(package)):
        print(door, "lacks", set(package.__all__) - set(names))
    if "TYPE_CHECKING" in names:
        print(door, "gives what it imports itself")
    for value in found[0]:
        if isinstance(value, type) and pickle.loads(pickle.dumps(value)) is not value:
            print(value)
"""


def test_any_part_of_a_parameter_server_may_be_imported_first() -> None:
    """What is fetched late hides no circle."""
    program = f"""
import os, sys, numpy
for module in {sorted(m for m in PACKAGES if m.startswith("zstrat.ps."))}:
    if (child := os.fork()) == 0:
        exec(f"from {{module}} import *")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(module)
"""
    assert printed(program) == ""


def test_nothing_is_collected_while_a_name_is_fetched() -> None:
    """And what is fetched counts as old: the next collection does not go through it.
    What a program has set aside stays so, and so does its choice to collect nothing."""
    assert printed(_COLLECTIONS) == ""


_COLLECTIONS = """
import gc
collections = []
gc.callbacks.append(lambda when, told: collections.append(told))
import zstrat as zs
def fetch(name):
    collections.clear()
    getattr(zs, name)
    return len(collections), sum(map(len, map(gc.get_objects, (0, 1))))
before, known = gc.get_freeze_count(), len(gc.get_objects())
count, young = fetch("ParameterServerStrategy")
found = len(gc.get_objects()) - known
if count > 2 or not gc.isenabled() or gc.get_freeze_count() > before:
    print(count, "collections", gc.isenabled(), gc.get_freeze_count())
if found < 50_000 or young > 5_000:
    print("of", found, "objects", young, "are young")
gc.freeze()
held = gc.get_freeze_count()
fetch("CheckpointManager")
if not gc.isenabled() or gc.get_freeze_count() < held - 100:
    print("of", held, "objects that were set aside", gc.get_freeze_count(), "still are")
gc.disable()
fetch("LocalCluster")
if gc.isenabled():
    print("garbage is collected, which the program has forbidden")
"""


def test_a_look_at_a_cluster_imports_no_other_command() -> None:
    """It may be asked every few seconds by whoever watches a cluster."""
    program = """
import sys
from zstrat.cli import main
main(["status", "--help"], standalone_mode=False)
absent = "jax", "psutil", "zstrat.ps", "zstrat.collectives", "zstrat.launch.fleet"
print("there:", [name for name in absent if name in sys.modules])
"""
    assert printed(program).splitlines()[-1] == "there: []"
