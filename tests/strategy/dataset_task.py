"""One task of a MultiWorkerMirroredStrategy that draws from the files of a folder, in a
process of its own. Prints a line of JSON: the elements by policy, and the sum of all.

    python dataset_task.py FOLDER
"""

import json
import sys
from pathlib import Path

import jax.numpy as jnp

import zstrat as zs
from zstrat.data import AutoShardPolicy, Dataset, Options


def main(folder):
    paths = sorted(Path(folder).glob("*.npy"))
    with zs.MultiWorkerMirroredStrategy() as strategy:
        found = {}
        for policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA, AutoShardPolicy.OFF):
            dataset = Dataset.from_npy(paths).with_options(Options(policy)).batch(4)
            elements = strategy.experimental_distribute_dataset(dataset)
            found[policy.name] = [x.tolist() for x in elements]

        @zs.function
        def total(iterator):
            summed = strategy.run(jnp.sum, args=(next(iterator),))
            return strategy.reduce("sum", summed, None)

        def dataset_fn(context):
            return Dataset.range(3 + 2 * context.input_pipeline_id).batch(2)

        iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
        sums = []
        while True:
            try:
                sums.append(int(total(iterator)))
            except zs.OutOfRangeError:
                break
        found["sums"] = sums
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
