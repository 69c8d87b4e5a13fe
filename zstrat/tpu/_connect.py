"""TF's call between a resolver and its TPU system, where jax has nothing to do."""

from __future__ import annotations

from zstrat.cluster import ClusterResolver, ClusterSpec, TPUClusterResolver


def experimental_connect_to_cluster(
    cluster_spec_or_resolver: ClusterSpec | ClusterResolver,
) -> None:
    """Makes sure that this process reaches the devices of the cluster.

    Those of its own host it has, as soon as it uses jax; nothing is connected then.
    TensorFlow lets one client use the devices of other hosts. In jax each host runs the
    program: `jax.distributed.initialize` brings the processes together, before their
    first use of a device. Of a TPU these are its own hosts; the coordinator that a
    `TPUClusterResolver` may name beside them has no device.

    Raises:
        ValueError: The argument is neither a spec nor a resolver.
        RuntimeError: The cluster has several tasks, and the processes of this job of
            jax are not as many.
    """
    if isinstance(cluster_spec_or_resolver, ClusterSpec):
        spec = cluster_spec_or_resolver
    elif isinstance(cluster_spec_or_resolver, ClusterResolver):
        spec = cluster_spec_or_resolver.cluster_spec()
    else:
        raise ValueError(
            "`cluster_spec_or_resolver` must be a `ClusterSpec` or a `ClusterResolver`,"
            f" got {type(cluster_spec_or_resolver).__name__}"
        )
    jobs = spec.jobs
    if isinstance(cluster_spec_or_resolver, TPUClusterResolver):
        jobs = [job for job in jobs if job == cluster_spec_or_resolver.get_job_name()]
    tasks = sum(spec.num_tasks(job) for job in jobs)
    if tasks <= 1:
        return
    import jax

    joined = jax.process_count() if jax.distributed.is_initialized() else 1
    if joined != tasks:
        raise RuntimeError(
            f"the cluster has {tasks} tasks, and {joined} process(es) of jax are "
            "together: call jax.distributed.initialize(coordinator_address, "
            f"num_processes={tasks}, process_id) in each of them before jax is used"
        )
