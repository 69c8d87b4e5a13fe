"""Programs that share parameter servers: TF's between-graph training.

Every worker runs the whole program, and none coordinates: the chief (the first worker
where there is none) creates the variables, and the others, which create the same ones
in the same order, wait for them. From then on each program reads and updates the
variables independently. The replicas of one program are in sync; those of different
programs are not.

Law of the file: a variable is identified by its index in the order of creation, which
must be the same in all programs. A creation that failed has no index in any program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

import jax

from zstrat.cluster import (
    detect,
    id_in_cluster,
    query_cluster_spec,
    task_count,
    worker_count,
)
from zstrat.config import Settings, environment, settings_from
from zstrat.coordinator import ClusterSession, hold_session, join_session
from zstrat.data import InputContext
from zstrat.strategy._devices import ps_names, task_names
from zstrat.strategy._extended import StrategyExtended
from zstrat.strategy._local_strategy import LocalStrategy
from zstrat.strategy._strategy import Closing
from zstrat.strategy.replica._local_run import LocalMesh

from ._server_variables import ServerVariables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.cluster import ClusterResolver, ClusterSpec
    from zstrat.strategy.input._inputs import ProcessInputs

    Connect = Callable[[ClusterSpec, Settings, bool, int], ClusterSession]


def _connect(
    spec: ClusterSpec, settings: Settings, is_chief: bool, index: int
) -> ClusterSession:
    if is_chief:
        return hold_session(spec, settings)
    return join_session(spec, settings, index)


@final
class BetweenGraphStrategy(LocalStrategy, Closing):
    """Asynchronous training of several programs with variables on parameter servers.

    The constructor blocks until all parameter servers (ps) answer, and, in a program
    that is not the chief, until the chief has connected. Variables created in `scope`
    are distributed over the ps in turn. A program that is not the chief waits up to
    ``timeouts.request`` for the chief to create a variable: DeadlineExceededError if
    the chief has not created it by then (the program may try again), and
    InvalidArgumentError if it has created another one instead.

    Every program distributes its own datasets: the functions of
    `distribute_datasets_from_function` get the number of the program (the chief first,
    then the workers), and `experimental_distribute_dataset` divides data only among the
    replicas of this program, so that all programs read all of the data.

    Args:
        cluster_resolver: Knows the tasks of the cluster, and which task this program
            is. Default: what `zs.cluster_resolver.detect` finds, first by TF_CONFIG.
        devices: The devices of this program's replicas; default: all devices.
        replicas, stores_per_ps, on_ps_loss, resume: Arguments of
            `ParameterServerStrategy`; only their defaults are accepted, as no program
            coordinates the others.
        settings: Timeouts, keys and limits; default: from the environment.
        connect: Function that opens the session; tests replace it.

    Raises:
        ValueError: The cluster has no ps, or it is not known which task this program
            is, or its task does not train.
        DeadlineExceededError: A ps does not answer in time, or the chief does not
            connect.
        BusyError: Another program uses the ps.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        replicas: int = 0,
        stores_per_ps: int = 1,
        on_ps_loss: str = "raise",
        resume: str | None = None,
        settings: Settings | None = None,
        connect: Connect = _connect,
    ) -> None:
        _refuse_what_needs_a_coordinator(
            replicas=replicas,
            stores_per_ps=stores_per_ps,
            on_ps_loss=on_ps_loss,
            resume=resume,
        )
        resolver = cluster_resolver or detect()
        spec, job, index = _task(resolver)
        settings = settings_from(environment()) if settings is None else settings
        number = id_in_cluster(spec, job, index)
        is_first = number == 0  # worker 0 may be one of those that are missing
        self._resolver = resolver
        local = jax.local_devices() if devices is None else devices
        self._mesh = LocalMesh(self, list(local))
        self._pipeline = InputContext(
            worker_count(spec, job), number, self._mesh.replicas
        )
        # After all checks of arguments, because it blocks until the servers answer.
        self._session = connect(spec, settings, is_first, index)
        ps_count = task_count(spec, "ps")
        self._variables = variables = ServerVariables(self._session, ps_count)
        self._extended = StrategyExtended(
            self,
            task_names(self._mesh.devices, job, index),
            ps_names(ps_count),
            variables.owns,
            colocated=variables.colocated,
            between_graph=True,
            initializes=is_first,
            saves=is_first,
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        return self._resolver

    def close(self) -> None:
        """Disconnects from the parameter servers, which keep the variables for the
        other programs. Closing twice is allowed; ``with`` closes at its end."""
        self._session.close()

    def _function_inputs(self) -> ProcessInputs:
        # A dataset that is given to all programs is whole in each of them, as in TF:
        # only functions get the number of the program.
        return replace(self._inputs(), context=self._pipeline)

    def __repr__(self) -> str:
        return (
            f"<zstrat.BetweenGraphStrategy: {self._extended.worker_devices[0]}, "
            f"{len(self._extended.parameter_devices)} ps>"
        )


_NEEDED: Final[dict[str, tuple[object, str]]] = {
    "replicas": (0, "each would have to learn which backups take over"),
    "stores_per_ps": (1, "each would have to learn where stores are"),
    "on_ps_loss": ("raise", "each would have to go back to the same checkpoint"),
    "resume": (None, "the others would have to enter the session of the next chief"),
}
"""For each argument that needs a coordinator: its default, and the reason why another
value is refused."""


def _refuse_what_needs_a_coordinator(**given: object) -> None:
    for option, value in given.items():
        default, why = _NEEDED[option]
        if value != default:
            raise ValueError(
                f"{option}={value!r}: BetweenGraphStrategy cannot have that, as its "
                f"programs share parameter servers without a coordinator, and {why}: "
                "leave it out and save checkpoints, or use ParameterServerStrategy"
            )


def _task(resolver: ClusterResolver) -> tuple[ClusterSpec, str, int]:
    spec = query_cluster_spec(resolver)
    job, index = resolver.task_type, resolver.task_id
    if not job or index is None:
        raise ValueError(
            "When `cluster_spec` is given, you must also specify `task_type` and "
            "`task_id`: they say which program of the cluster this is"
        )
    if not task_count(spec, "ps"):
        raise ValueError(
            f"The cluster spec needs to have `ps` jobs, and has {spec.jobs}; "
            "of processes that a launcher started, cluster_resolver="
            "zs.cluster_resolver.detect({'ps': 1, 'worker': 3}) makes some ps"
        )
    if job not in ("chief", "worker"):
        raise ValueError(
            f"the task {job}:{index} does not train: start a ps with zs.Server or "
            "zstrat-ps, and this program as the chief or a worker"
        )
    return spec, job, index
