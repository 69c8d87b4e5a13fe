"""MultiWorkerMirroredStrategy as programs use it, under ``zstrat run`` and without."""

import json
import signal

import numpy as np
import pytest
from system_ranks import Ranks, zstrat_run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

SIZE, STEPS = 3, 8

HEAD = """
import jax.numpy as jnp, optax
strategy = zs.MultiWorkerMirroredStrategy(
    communication_options=zs.CommunicationOptions(
        timeout_seconds=30.0, implementation=os.environ.get("IMPLEMENTATION", "AUTO")
    )
)
size = strategy.cluster_resolver.cluster_spec().num_tasks("worker")
with strategy.scope():
    w = zs.Variable(np.full(4, 0.0 if task else 5.0, np.float32), name="w")
    made = zs.Variable(
        0, name="made", aggregation=zs.VariableAggregation.ONLY_FIRST_REPLICA
    )
    seen = zs.Variable(np.int64(0))  # what jax would cut to 32 bits lives outside of it
    optimizer = zs.Optimizer(optax.sgd(0.01, momentum=0.9))

@zs.function
def step(target):
    def replica(target):
        loss, gradient = zs.value_and_grad(lambda w: jnp.sum((w - target) ** 2))(w)
        optimizer.apply_gradients(gradient, w)
        made.assign_add(1)
        return loss
    return strategy.reduce("sum", strategy.run(replica, args=(target,)), None)

mine = np.full(4, task, np.float32)
LOST = (zs.PeerLostError, zs.CollectiveTimeoutError, zs.UnavailableError)
"""


def by_hand(steps):
    """Losses and the value, by the mathematics of momentum; ranks aim at 0, 1, 2."""
    w, speed, losses = 5.0, 0.0, []
    for _ in range(steps):
        losses.append(sum(4 * (w - rank) ** 2 for rank in range(SIZE)))
        speed = 0.9 * speed + sum(2 * (w - rank) for rank in range(SIZE))
        w -= 0.01 * speed
    return losses, w


DYING = """
def sharded_rows():
    dataset = zs.data.Dataset.range(12).shuffle(12, seed=1).batch(12)
    return strategy.experimental_distribute_dataset(dataset)

def rows(distributed):
    return [int(row) for element in distributed for row in np.ravel(element)]

told, losses = [], {}
distributed, first = sharded_rows(), int(made.numpy())
if first == 0:
    rows(distributed)
seen_first = int(seen.numpy())
while (now := int(made.numpy())) < STEPS:
    if task == LOST_TASK and first == 0 and now == 3:
        threading.Thread(target=lambda: os.kill(os.getpid(), 9)).start()
    try:
        losses[now] = float(step(mine))
        seen.assign(now + 1)
    except LOST as error:
        told.append(str(error))
        strategy.reform(timeout=60)
try:
    refused = str(rows(distributed))
except ValueError as error:
    refused = str(error)
drawn = rows(sharded_rows())
say(json.dumps([losses, w.numpy().tolist(), told, seen_first, refused, drawn]))
strategy.close()
"""


@pytest.mark.parametrize(
    ("lost", "environment"),
    [
        (0, {}),  # it keeps the register of the others
        pytest.param(  # each on a host of its own
            *(2, {"IMPLEMENTATION": "RING", "HOSTS": "abc"}), marks=pytest.mark.thorough
        ),
    ],
)
def test_a_worker_that_dies_in_a_step_is_named_and_takes_over_from_the_others(
    lost, environment
):
    program = HEAD + DYING.replace("STEPS", str(STEPS)).replace("LOST_TASK", str(lost))
    code, said = zstrat_run(SIZE, program, "--restarts", "1", **environment)
    assert code == 0, said
    assert said[None] == [f"worker:{lost} was killed by SIGKILL: restarting it"]
    losses, value = by_hand(STEPS)
    all_drawn = []
    for rank in range(SIZE):
        (line,) = said[rank]
        found, w, told, seen, refused, drawn = json.loads(line)
        # A shuffled dataset: all are told to make it anew, and then read each row once.
        number = "1.1" if rank == lost else "1.2"
        assert f"this one begins {number} (distribution.pass)" in refused
        assert "make the dataset again in all of them, from shuffle() on" in refused
        all_drawn += drawn
        np.testing.assert_allclose(w, value, rtol=1e-5)
        for now, loss in found.items():
            np.testing.assert_allclose(loss, losses[int(now)], rtol=1e-5)
        if rank == lost:
            assert min(map(int, found)) >= 3  # not from the beginning
            assert seen >= 3
        else:
            assert len(found) == STEPS
            assert len(told) == 1
            assert f"lost rank {lost} (/job:worker/task:{lost} at ipc://" in told[0]
    assert sorted(all_drawn) == list(range(12))


SAVING = """
folder = os.environ["FOLDER"]
checkpoint = zs.Checkpoint(w=w, made=made, optimizer=optimizer)
manager = zs.CheckpointManager(checkpoint, f"{folder}/{task}", max_to_keep=2)
if strategy.extended.should_checkpoint:
    say("saves")
path = manager.restore_or_initialize()
came = "from a checkpoint" if path else "from the beginning"
while (now := int(made.numpy())) < STEPS:
    if now == 3:
        manager.save()
    if task == 1 and now == 5 and not path:
        os.kill(os.getpid(), 9)
    try:
        step(mine)
    except LOST:
        strategy.reform(timeout=60)
        checkpoint.restore(manager.latest_checkpoint)
        say("back at", int(made.numpy()))
say(came + ':', json.dumps(w.numpy().tolist()))
strategy.close()
"""


def test_after_a_loss_all_go_on_from_a_checkpoint(tmp_path):
    program = HEAD + SAVING.replace("STEPS", str(STEPS))
    with Ranks(SIZE, program, FOLDER=str(tmp_path)) as ranks:
        assert ranks.all[1].wait() == -signal.SIGKILL
        ranks.start(1)
        said = [ranks.all[rank].stdout.read().splitlines() for rank in range(SIZE)]
        assert ranks.ends() == [0] * SIZE, said
    _, value = by_hand(STEPS)
    for rank in range(SIZE):
        came, words = said[rank][-1].split(": ")
        # The others have made more steps; it restores after it took over, as they do.
        assert came == ("from a checkpoint" if rank == 1 else "from the beginning")
        np.testing.assert_allclose(json.loads(words), value, rtol=1e-5)
    assert said[0][:-1] == ["saves", "back at 3"]
    assert said[2][:-1] == ["back at 3"]
