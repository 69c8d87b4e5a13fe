"""Parameter-server training: variables on parameter servers (ps), steps on workers, one
coordinator.

The strategy connects to the cluster when it is made, and owns this connection. If it is
pickled and sent to a worker, it becomes a `WorkerStrategy` there: the same methods over
that worker's devices, without a connection.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import jax
import numpy as np

from zstrat.cluster import (
    RunningCluster,
    detect,
    query_cluster_spec,
    validate_cluster_spec,
)
from zstrat.config import OUTPUTS, Settings, environment, settings_from
from zstrat.coordinator import (
    PS_WAIT,
    ClusterSession,
    CoordinatedStrategy,
    StoreServers,
    Workers,
    connect_session,
)
from zstrat.program import hide_frames, worker_context
from zstrat.strategy._devices import device_names, ps_names
from zstrat.strategy._extended import StrategyExtended
from zstrat.strategy._strategy import Closing, Strategy
from zstrat.strategy.input._inputs import UnbuiltDataset
from zstrat.variables import AbstractVariable, recorder

from ._server_variables import ServerVariables
from ._variable_placement import PlacementRule
from ._worker_strategy import worker_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.cluster import ClusterResolver, ClusterSpec
    from zstrat.data import InputContext
    from zstrat.program import Plan
    from zstrat.strategy._options import InputOptions
    from zstrat.variables import Creator

    Connect = Callable[..., ClusterSession]
    """Called with a ClusterSpec and Settings; with ``replicas=`` if not 0,
    ``stores_per_ps=`` if not 1, and ``resume=`` and ``restart_partial=`` if the session
    has a name."""

_MOST_STORES: Final = 64
"""Largest number of stores (logical servers) of one ps: each has a port, a thread and a
connection to every worker."""

_LONGEST_NAME: Final = 200
"""Largest number of characters of the name of a session."""

_log: Final = logging.getLogger(__name__)


@final
class ParameterServerStrategy(Strategy, CoordinatedStrategy, Closing):
    """Asynchronous training with variables on parameter servers.

    The constructor connects to the cluster: all parameter servers (ps) must answer, and
    at least one worker; other workers may connect later. Variables created in `scope`
    are distributed over the ps in turn.

    Workers may be added and removed during training: by `workers`, and by the resolver,
    if its answer may change (`ClusterResolver.may_change`): it is queried again after a
    loss and every ``ZSTRAT_RESOLVE`` seconds (10). The parameter servers are those of
    its first answer, until `parameter_servers` adds or drains some.

    If another strategy of this program uses the cluster and has no unfinished work, it
    is closed, but only after the arguments were checked and all ps and a worker have
    answered.

    Args:
        cluster_resolver: Knows the tasks of the cluster, and which task this process
            is. Default: what `zs.cluster_resolver.detect` finds, first by TF_CONFIG. It
            may also be a `zs.LocalCluster` or a fleet of `zs.launch`, which is kept
            alive as long as the strategy, and whose settings are used if none are
            given.
        variable_partitioner: Called with ``shape=`` and ``dtype=`` of each new variable
            of rank 1 or more; returns a number of parts for each axis, which must be 1
            except for the first axis (`zstrat.partitioners`). A variable in several
            parts is a `ShardedVariable`.
        placement: "round_robin": new variables and parts are assigned to the ps in
            turn, in order of creation. "bytes": each is assigned to the ps that stores
            the fewest bytes of variables.
        prefetch: Optimizer steps whose batches, ids, rows and values a worker fetches
            while one computes, which hides its round trip. Gradients of W workers are W
            - 1 updates old, and each further step makes them W updates older: more than
            1 often needs a lower learning rate. Default: ``ZSTRAT_PREFETCH``, else 0;
            with 0, training by one worker gives the results of plain optax.
        staleness: Maximum number of steps by which a worker may be ahead of the slowest
            one: it gets its step c + staleness + 1 when all workers have ended c steps
            (stale synchronous parallel). 0: in lock-step. Default: no bound. To merge
            the gradients of several steps into one update see `zstrat.Rounds`.
        output: "program": lines that steps and dataset functions print on workers are
            also printed here, after the name of the worker. "files": such lines are
            only in the logs of the workers. Default: ``ZSTRAT_OUTPUT``, else "program".
        on_ps_loss: What happens when a parameter server is lost. "raise": calls raise
            `PSUnavailableError`, and the user has to restart the program. "restore":
            the program waits for the server; if that returns without its state, all ps
            are restored from the last complete checkpoint that this program has saved
            or restored, and training continues. Steps that ended after that checkpoint
            are lost, as are later assignments by the program; steps that were running
            run again, and each is applied once to the restored values. A logged warning
            says which checkpoint was restored and how many steps were lost, and so does
            ``coordinator.metrics()``. Results that were fetched remain available; large
            results that were not fetched are lost, and datasets of the workers start
            again. Variables of this process are not changed. The checkpoint must have
            all variables and optimizers of the scope; otherwise `PSUnavailableError`
            names those that are missing.
        resume: Name of the session. If an earlier program left a session of this name
            on the cluster, because it was killed or failed, this program continues with
            its variables: if created in the same order with the same names, shapes and
            dtypes, they have their old values, and optimizers their old state.
            `resumed` says whether there was such a session. If there was none, the
            session starts empty, as it does without a name, and the cluster drops all
            older variables. `close` ends the session; a program that ends otherwise
            leaves it on the cluster. A step that was running when the earlier program
            ended may have updated some ps and not others; it has no effect later. With
            `Rounds` such a step has updated all ps or none, and contributions of steps
            that had ended count in this program's first round. Datasets begin where
            this program begins them. With ``replicas`` both programs must give this
            argument.
        ps_wait_timeout: Seconds for which ``on_ps_loss="restore"`` waits for a lost ps
            before calls raise `PSUnavailableError`. Default: 600.
        replicas: 1: the state of each ps is also in the memory of another ps, its
            backup, and an update is acknowledged only when both have it. Then any one
            ps may be killed, frozen or disconnected: the backup serves in its place
            within the timeout, no error is raised, and no update is lost or applied
            twice. A ps that returns, empty or not, receives the missing copy while
            training continues. Until then there is one copy, as a logged warning and
            ``coordinator.metrics()["stores_without_backup"]`` say. If both copies are
            lost, ``on_ps_loss`` applies. This takes twice the memory, and each update
            is computed twice. Needs at least 2 ps.
        stores_per_ps: Number of logical servers, *stores*, in each ps. Variables are
            assigned to stores in turn, and `parameter_servers` moves stores, one after
            the other, when a ps is added or drained. With more stores the state moves
            in smaller pieces, and a `ShardedVariable` may have more components; but
            each store needs a separate message. With ``resume`` both programs must give
            the same number.
        settings: Timeouts, keys and limits; default: from the environment.
        connect: Function that opens the session; tests replace it.

    Raises:
        ValueError: The cluster is empty, has a wrong job, or no ps or worker, or its ps
            are not numbered from 0 without gaps, or this process is one of the ps or
            workers; or ``placement`` is not known, or another argument is not valid.
        DeadlineExceededError: A task does not answer in time; the error names it.
        HeldError: Another program uses the cluster and is alive. Raised within about a
            second, unless ``settings.timeouts.turn`` asks to wait for that program to
            end.
        BusyError: Another program uses the cluster that was silent for a while and then
            continued; or another strategy of this program uses it and has unfinished
            work.
        PSUnavailableError: Only a part of the session to resume is left, and
            ``on_ps_loss`` is "raise". The remaining part is not changed.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | RunningCluster | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        placement: str = "round_robin",
        prefetch: int | None = None,
        staleness: int | None = None,
        output: str | None = None,
        on_ps_loss: str = "raise",
        ps_wait_timeout: float | None = None,
        replicas: int = 0,
        stores_per_ps: int = 1,
        resume: str | None = None,
        settings: Settings | None = None,
        connect: Connect = connect_session,
    ) -> None:
        self._given: Final = cluster_resolver
        """The argument ``cluster_resolver``, kept because tasks that were started for
        this program end with it."""
        if isinstance(cluster_resolver, RunningCluster):
            settings = settings or cluster_resolver.settings
            cluster_resolver = cluster_resolver.resolver
        elif cluster_resolver is None:
            cluster_resolver = _detected()
        spec = _checked_spec(cluster_resolver)
        rule = _rule(placement)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise ValueError(
                f"variable_partitioner={variable_partitioner!r}: expected None or a "
                "function of shape= and dtype=, as those of zstrat.partitioners"
            )
        if settings is None:
            settings = settings_from(environment())
        elif not isinstance(settings, Settings):
            raise TypeError(
                f"settings={settings!r:.80}: expected a zstrat.config.Settings, or "
                "None for those of the environment"
            )
        if prefetch is not None:
            if not isinstance(prefetch, int | np.integer) or prefetch < 0:
                raise ValueError(
                    f"prefetch={prefetch!r}: expected None or a number of steps, 0 or "
                    "more"
                )
            settings = replace(settings, prefetch=int(prefetch))
        bound = _staleness(staleness)
        workers = len(spec.task_indices("worker"))
        if settings.prefetch > 1 and workers > 1:
            age = (settings.prefetch + 1) * workers - 1
            _log.warning(
                "prefetch=%d with %d workers: each gradient is about %d updates old "
                "when it is applied, and many models then need a lower learning rate; "
                "with prefetch=0 it is %d",
                settings.prefetch,
                workers,
                age,
                workers - 1,
            )
        if output is not None:
            if output not in OUTPUTS:
                raise ValueError(
                    f"output={output!r}: expected one of {', '.join(OUTPUTS)}"
                )
            settings = replace(settings, output=output)
        restore_timeout = _ps_loss_timeout(on_ps_loss, ps_wait_timeout)
        if replicas not in (0, 1):
            raise ValueError(f"replicas={replicas!r}: expected 0 or 1")
        _check_stores(stores_per_ps)
        # Only what differs from the default is passed: see `Connect`.
        if stores_per_ps > 1:
            connect = partial(connect, stores_per_ps=int(stores_per_ps))
        if replicas:
            connect = partial(connect, replicas=int(replicas))
        if resume is not None:
            _check_name(resume)
            restart_partial = restore_timeout is not None
            connect = partial(connect, resume=resume, restart_partial=restart_partial)
        self._resolver = cluster_resolver
        self._partitioner = variable_partitioner
        try:
            self._session = connect(spec, settings)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise
        self._session.staleness = bound
        if restore_timeout is not None:
            self._session.recover(restore_timeout)
        self._workers = Workers(self._session)
        self._parameter_servers = StoreServers(self._session)
        if cluster_resolver.may_change:
            self._workers.follow(lambda: query_cluster_spec(cluster_resolver))
        self._ps_count = spec.num_tasks("ps") * int(stores_per_ps)
        """Number of stores (logical servers), whichever processes serve them."""
        # Fixed here: plans that were traced for it must stay true when workers change.
        self._replicas = max(1, self._session.devices)
        self._variables = variables = ServerVariables(
            self._session,
            self._ps_count,
            variable_partitioner,
            rule,
            self._workers.bind,
        )
        self._extended = StrategyExtended(
            self,
            device_names(self._session.platform, self._replicas),
            ps_names(self._ps_count),
            variables.owns,
            colocated=variables.colocated,
        )

    @property
    def session(self) -> ClusterSession:
        """The connection to the cluster, which this strategy owns."""
        return self._session

    @property
    def resumed(self) -> bool:
        """Whether the variables are those that an earlier program left on the cluster
        (see the argument ``resume``)."""
        return self._session.resumed

    @property
    def cluster_resolver(self) -> ClusterResolver:
        return self._resolver

    @property
    def workers(self) -> Workers:
        """The workers of the cluster; workers can be added and removed while training
        continues."""
        return self._workers

    @property
    def parameter_servers(self) -> StoreServers:
        """The parameter servers of the cluster; servers can be added and drained while
        training continues."""
        return self._parameter_servers

    @property
    def variable_partitioner(self) -> Callable[..., Any] | None:
        return self._partitioner

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of devices of one worker (TF's rule: not the number of workers)."""
        return self._replicas

    @property
    def extended(self) -> StrategyExtended:
        """Methods for algorithms that know of replicas: devices of one worker, and the
        parameter servers, where variables are stored."""
        return self._extended

    def experimental_distribute_dataset(  # type: ignore[override]  # no elements here
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> UnbuiltDataset:
        """Distributes a dataset of global batches over the replicas of each worker,
        which reads all of it.

        On a worker, in the function that ``coordinator.create_per_worker_dataset``
        takes, it returns what `Strategy.experimental_distribute_dataset` returns for
        one input pipeline. On the coordinator it returns a handle that cannot be
        iterated, which ``create_per_worker_dataset`` also takes.

        Raises:
            NotImplementedError: ``options`` asks for PER_REPLICA.
        """
        return UnbuiltDataset(self, dataset, options, is_function=False)

    def distribute_datasets_from_function(  # type: ignore[override]  # as above
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> UnbuiltDataset:
        """Calls ``dataset_fn`` in each worker; the replicas of a worker take the
        elements of its dataset in turn.

        The `InputContext` that ``dataset_fn`` gets has the worker's index and the
        number of workers; its ``num_replicas_in_sync`` is the number of replicas of one
        worker. For where this may be called and what it returns see
        `experimental_distribute_dataset`.

        Raises:
            NotImplementedError: ``options`` asks for PER_REPLICA.
        """
        return UnbuiltDataset(self, dataset_fn, options, is_function=True)

    def delete_variables(self, tree: Any) -> None:
        """Frees variables, and the optimizers' slots of them, on their ps.

        Dropping the last handle of a variable frees nothing on the ps, because
        functions that were sent to workers may still use the variable; the end of the
        session frees all variables. Call ``coordinator.join`` first: a step that uses a
        deleted variable fails with `NotFoundError`, and so does every later use of its
        handles.

        Args:
            tree: A variable, or a pytree of variables; leaves of other kinds are
                ignored, and a variable that occurs twice counts once. Of a sharded
                variable all components are freed.

        Raises:
            ValueError: A variable was not created in the scope of this strategy.
            NotFoundError: A variable was deleted before; nothing is deleted on its ps.
            PSUnavailableError: A ps is gone.
        """
        # By key, as several handles may be of one variable.
        parts = {
            part.spec.key: part
            for leaf in jax.tree.leaves(tree)
            if isinstance(leaf, AbstractVariable)
            for part in leaf.components
        }
        self._variables.delete_variables(list(parts.values()))

    def close(self) -> None:
        """Ends the connection; the daemons drop everything that was created, and wait
        for another coordinator. Closing twice is allowed. ``with`` closes at its end,
        but after an exception it leaves a session that has a name (``resume``) on the
        cluster."""
        self._session.close()

    def __exit__(self, *error: object) -> None:
        if any(error):
            # Before `close`, which would end a session that another program may resume.
            self._session.leave()
        self.close()

    def require_known(self, plan: Plan) -> None:
        self._variables.require_known(plan)

    def _creator(self) -> Creator | None:
        return self._variables

    def _devices(self) -> Sequence[jax.Device]:
        # The coordinator plans for its workers' devices and computes on its own device.
        return ()

    def _used(self, method: str) -> None:
        if recorder.get() is None and worker_context.get() is None:
            _log.warning(
                "strategy.%s is executed on the coordinator, on one device and without "
                "ClusterCoordinator.schedule: that is fine for a try and slow for "
                "training; call it inside a zs.function and schedule that",
                method,
            )

    def __reduce__(self) -> Any:
        return worker_strategy, (self._ps_count, self._replicas)

    def __repr__(self) -> str:
        return (
            f"<zstrat.ParameterServerStrategy: {len(self._parameter_servers)} ps, "
            f"{self._session.worker_count} workers>"
        )


def _check_stores(stores_per_ps: object) -> None:
    # True is an int of Python.
    is_number = (
        isinstance(stores_per_ps, int | np.integer) and stores_per_ps is not True
    )
    if not is_number or not 1 <= stores_per_ps <= _MOST_STORES:  # type: ignore[operator]
        raise ValueError(
            f"stores_per_ps={stores_per_ps!r}: expected a number, 1 to {_MOST_STORES}"
        )


def _staleness(staleness: object) -> int | None:
    if staleness is None:
        return None
    if not isinstance(staleness, int | np.integer) or staleness < 0:
        raise ValueError(
            f"staleness={staleness!r:.80}: expected None or a number of steps, 0 or "
            "more"
        )
    return int(staleness)


def _check_name(resume: object) -> None:
    if not isinstance(resume, str) or not 0 < len(resume) <= _LONGEST_NAME:
        raise ValueError(
            f"resume={resume!r:.80}: expected None or what the session is called, 1 to "
            f"{_LONGEST_NAME} characters"
        )


def _rule(placement: str) -> PlacementRule:
    known = [rule.value for rule in PlacementRule]
    if placement not in known:
        raise ValueError(f"placement={placement!r}: expected one of {known}")
    return PlacementRule(placement)


def _ps_loss_timeout(on_ps_loss: str, timeout: float | None) -> float | None:
    """Returns the seconds to wait for a lost ps; None if calls raise at once."""
    if on_ps_loss not in ("raise", "restore"):
        raise ValueError(f"on_ps_loss={on_ps_loss!r}: expected 'raise' or 'restore'")
    if timeout is not None and not _is_finite_wait(timeout):
        raise ValueError(
            f"ps_wait_timeout={timeout!r}: expected a finite number of seconds above 0"
        )
    if on_ps_loss == "raise":
        if timeout is not None:
            raise ValueError(
                f"ps_wait_timeout={timeout!r} is for on_ps_loss='restore': without it "
                "nothing waits for a lost ps"
            )
        return None
    return PS_WAIT if timeout is None else float(timeout)


def _is_finite_wait(timeout: object) -> bool:
    return isinstance(timeout, int | float | np.number) and bool(0 < timeout < math.inf)


def _detected() -> ClusterResolver:
    resolver = detect()
    # TF_CONFIG may be empty, and then no error has been raised.
    if not query_cluster_spec(resolver):
        raise ValueError(
            "nothing says where the cluster is: set TF_CONFIG, or give a resolver, a "
            "zs.LocalCluster, or what zs.launch.ssh, slurm, ray or dask returns"
        )
    return resolver


def _checked_spec(resolver: ClusterResolver) -> ClusterSpec:
    """Returns the cluster of the resolver, after checking it."""
    # In the order in which TF complains.
    spec = query_cluster_spec(resolver)
    if not spec:
        raise ValueError("Cluster spec must be non-empty in ParameterServerStrategy.")
    validate_cluster_spec(spec, resolver.task_type, resolver.task_id)
    for job in ("ps", "worker"):
        if job not in spec.jobs or not spec.num_tasks(job):
            raise ValueError(f"There must be at least one {job}.")
    if resolver.task_type in ("ps", "worker"):
        raise ValueError(
            f"this process is {resolver.task_type} {resolver.task_id} of the cluster, "
            "and a ParameterServerStrategy is made by the coordinator (task type "
            "'chief', or none): start zs.Server or zstrat-ps / zstrat-worker here"
        )
    return spec
