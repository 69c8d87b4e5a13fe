"""A shuffled dataset that processes deal out, after one of them was started anew."""

from __future__ import annotations

import json

import pytest
from system_ranks import zstrat_run

pytestmark = pytest.mark.processes

SIZE, ROWS = 3, 12

SHUFFLED = """
strategy = zs.MultiWorkerMirroredStrategy(
    communication_options=zs.CommunicationOptions(timeout_seconds=30.0)
)
with strategy.scope():
    made = zs.Variable(0, aggregation=zs.VariableAggregation.ONLY_FIRST_REPLICA)

@zs.function
def step():
    def replica():
        made.assign_add(1)
        return zs.get_replica_context().all_reduce("sum", np.float32(1))
    return strategy.run(replica)

LOST = (zs.PeerLostError, zs.CollectiveTimeoutError, zs.UnavailableError)

def dealt():
    dataset = zs.data.Dataset.range(12).shuffle(12, seed=1).batch(12)
    return strategy.experimental_distribute_dataset(dataset)

def rows(distributed):
    return [int(row) for element in distributed for row in np.ravel(element)]

distributed = dealt()
if int(made.numpy()) == 0:
    rows(distributed)
    try:
        while True:
            if task == 1 and int(made.numpy()) == 2:
                threading.Thread(target=lambda: os.kill(os.getpid(), 9)).start()
            step()
    except LOST:
        strategy.reform(timeout=60)
try:
    refused = str(rows(distributed))
except ValueError as error:
    refused = str(error)
say(json.dumps([refused, rows(dealt())]))
strategy.close()
"""


def test_all_are_told_to_make_it_anew_and_then_read_each_row_once():
    code, said = zstrat_run(SIZE, SHUFFLED, "--restarts", "1")
    assert code == 0, said
    assert said[None] == ["worker:1 ended with exit code 137: starting it anew"]
    drawn = []
    for rank in range(SIZE):
        (line,) = said[rank]
        refused, rows = json.loads(line)
        number = "1.1" if rank == 1 else "1.2"
        assert f"this one begins {number} (distribution.pass)" in refused
        assert "make the dataset anew in all of them, from shuffle() on" in refused
        drawn += rows
    assert sorted(drawn) == list(range(ROWS))
