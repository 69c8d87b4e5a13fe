"""Groups of worker daemons: the endpoint of the daemon serves them."""

import numpy as np

import zstrat as zs


def test_workers_of_a_cluster_form_a_group():
    with zs.LocalCluster(num_ps=1, num_workers=2) as cluster:
        resolver = cluster.resolver

        def total(context):
            options = {"lane": "tcp", "rendezvous_timeout": 30}
            with zs.collectives.Group(resolver, **options) as group:
                rank = context.input_pipeline_id
                found = group.all_reduce(np.full(100_000, rank + 1.0))
                assert group.rank == rank
            return zs.data.Dataset.from_tensor_slices(found[:1])

        strategy = zs.ParameterServerStrategy(resolver)
        with zs.ClusterCoordinator(strategy) as coordinator:
            iterator = iter(coordinator.create_per_worker_dataset(total))

            @zs.function
            def first(iterator):
                return next(iterator)

            value = coordinator.schedule(first, args=(iterator,))
            coordinator.join()
            np.testing.assert_array_equal(value.fetch(), 3.0)
        strategy.close()
