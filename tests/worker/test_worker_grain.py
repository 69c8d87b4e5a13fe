"""A grain dataset is what a dataset function may return, as any iterable of pytrees."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from zstrat.program import function

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("grain") is None,
    reason="grain is optional and not installed",
)


@function
def draw(iterator):
    return next(iterator)


def dataset_fn():
    import grain

    source = grain.MapDataset.range(12).shuffle(seed=7)
    source = source.map(lambda i: {"x": np.float32(i), "even": np.bool_(i % 2 == 0)})
    here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return source.batch(4).to_iter_dataset(here)


async def test_a_grain_dataset_is_passed_over_as_it_is(world):
    resource, layout = await world.build(dataset_fn)
    assert sorted(zip(layout.dtypes, map(tuple, layout.shapes), strict=True)) == [
        ("bool", (4,)),
        ("float32", (4,)),
    ]
    digest, arguments = await world.ship(draw), world.arguments(world.it(resource))
    batches = await world.run(digest, [1, 2, 3], arguments)
    assert sorted(float(x) for batch in batches for x in batch["x"]) == list(range(12))
    for batch in batches:
        np.testing.assert_array_equal(batch["even"], batch["x"] % 2 == 0)


def flags_are_read():
    """As grain does it where it starts processes."""
    from absl import flags

    return [np.bool_(flags.FLAGS.grain_enable_multiprocess_worker_profiling)]


async def test_flags_have_their_defaults_as_a_daemon_parses_none(world):
    import grain  # noqa: F401  # defines them
    from absl import flags

    flags.FLAGS.unparse_flags()
    with pytest.raises(flags.UnparsedFlagAccessError):
        flags_are_read()
    _, layout = await world.build(flags_are_read)
    assert layout.dtypes == ["bool"]
