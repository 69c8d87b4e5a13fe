"""Runs the closures of one session on the executor thread.

`Pipeline` decides what comes next, and this file does it: finds functions and
arguments, prepares and runs the program, and converts the outcome to endings and pushes
(`_pushes`). A batch whose steps draw nothing is prepared once for all its steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final
from weakref import WeakKeyDictionary, WeakSet

from zstrat.errors import BusyError, ZstratError
from zstrat.program import (
    SEGMENT,
    Function,
    Plan,
    WorkerContext,
    building,
    examples_in,
    fill_inputs,
    input_pipeline,
    window_of,
    worker_context,
)
from zstrat.ps import EagerRun
from zstrat.telemetry import EagerNotes, Phase
from zstrat.variables import RESIDENT, Storage, creator
from zstrat.wire import LEASE, RoundNumber

from . import _closure
from ._closure import Costs, Ending, ResultLayouts
from ._needs import Catalog
from ._pipeline import Pipeline
from ._pushes import StepPushes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from zstrat.config import Limits
    from zstrat.program import Prepared, StepIterator, StepResult, StepUpdate
    from zstrat.ps import PsUpdate
    from zstrat.variables import (
        GradientCall,
        OptimizerHandle,
        Variable,
        VariableRequest,
    )
    from zstrat.wire import (
        Batch,
        BuildResource,
        LayoutMessage,
        PlainTree,
    )

    from ._closure import ClosureStep, Lent, Post, RoundPush
    from ._direct import Direct
    from ._leased_iterator import LeasedIterator
    from ._needs import Needs
    from ._pushes import PushEncoding
    from ._resources import Arguments, Leases, Resources

    Prepare = Callable[[Function, tuple[Any, ...], Mapping[str, Any]], Prepared]
    """The type of `zstrat.program.prepare`."""
    RunEager = Callable[
        [
            Function,
            tuple[Any, ...],
            Mapping[str, Any],
            Storage,
            Callable[[StepIterator], Any],
        ],
        StepResult,
    ]
    """The type of `zstrat.program.run_eager`."""


@final
@dataclass(slots=True, eq=False)
class _Task:
    """What the steps of one batch share; a step that has its own inputs has a `_Task`
    to itself."""

    function: bytes
    arguments: int
    context: WorkerContext
    low_water: int
    inputs: bytes | memoryview = b""
    leases: Leases = field(default_factory=dict)
    once: tuple[Prepared, Needs] | None = None
    """The shared preparation of a batch whose steps draw and look up nothing."""


@final
class StepRunner:
    """Prepares and runs the closures of one session.

    Args:
        index, count: Index of this worker, and number of workers.
        storage: Creates the storage of variables for one eager run; the storage records
            the times of the run.
        bind: Begins to register the tree of an optimizer on the parameter servers.
        carry_out: Sends what the thread has posted; called on the loop.
        end_lines: Ends the unfinished printed lines of the thread.
        limits: Limits of results, and of what is sent with a completion.
        encoding: Encodes gradients for the network.
        prefetch: Number of optimizer steps whose values are fetched while one computes.
    """

    def __init__(
        self,
        resources: Resources,
        *,
        index: int,
        count: int,
        prepare: Prepare,
        run_eager: RunEager,
        storage: Callable[[EagerRun, EagerNotes], Direct],
        bind: Callable[[GradientCall], Future[None]],
        carry_out: Callable[[Post], None],
        end_lines: Callable[[], None],
        limits: Limits,
        encoding: PushEncoding,
        prefetch: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock: Final = clock
        self.pipeline: Final = Pipeline(prefetch=prefetch)
        self.resources: Final = resources
        self._index, self._count = index, count
        self._prepare, self._run_eager = prepare, run_eager
        self._storage, self._bind = storage, bind
        self.carry_out: Final = carry_out
        self.end_lines: Final = end_lines
        self.encoding: Final = encoding
        # Weak: a function that is traced again and again makes a plan each time, and
        # what is remembered of a plan goes with it.
        self._bound: Final[WeakKeyDictionary[Plan, list[Future[None]]]] = (
            WeakKeyDictionary()
        )
        """By plan: registrations of the optimizers' trees on the servers, which trace
        the trees while the plan's first step is compiled."""
        self._layouts: Final = ResultLayouts(limits)
        self._costs: Final[dict[bytes, Costs]] = {}
        self._catalog: Final = Catalog()
        self.pushes: Final = StepPushes(resources, encoding)
        self._compiled: Final = WeakSet[Plan]()
        """Plans of windows of local steps that have run, so that their programs are
        compiled."""
        self._begun_with = -1
        """The version of the resident arrays with which the head of the line began to
        compute."""

    def statistics(self) -> dict[str, PlainTree]:
        """Returns counts of functions, traces, programs and layouts. Safe to call from
        the loop."""
        functions = [f for f in self.resources.functions() if isinstance(f, Function)]
        return {
            "functions": len(functions),
            "traces": sum(function.trace_count for function in functions),
            "cached_programs": sum(function.programs.kept for function in functions),
            "layouts": len(self._layouts),
        }

    # Events: called on the thread, between two pieces of work

    def dispatch(
        self,
        batches: Iterable[tuple[Batch, Sequence[memoryview]]],
        low_water: int,
    ) -> None:
        """Queues closures. ``batches`` are pairs of a batch and the inputs of its
        steps; the inputs are empty if the steps have none of their own."""
        now = self.clock()
        for batch, inputs in batches:
            context = WorkerContext(self._index, self._count, batch.attempt)
            task = _Task(batch.function, batch.arguments, context, low_water)
            # Kept per function and not per batch, so the first step of the next batch
            # is already measured.
            costs = self._costs.setdefault(batch.function, Costs())
            # Only steps with the same arguments can share a preparation; those with
            # inputs of their own are prepared one by one.
            if not inputs:
                self.pipeline.dispatched(task, costs, batch.steps, now)
                continue
            for step, data in zip(batch.steps, inputs, strict=True):
                own = _Task(batch.function, batch.arguments, context, low_water, data)
                if batch.leases:
                    # The coordinator appends the leases of a step to its inputs.
                    end = len(data) - batch.leases * LEASE.size
                    own.inputs = data[:end]
                    own.leases = self.resources.expect_leases(data[end:])
                self.pipeline.dispatched(own, costs, [step], now)

    def cancel(self, error: ZstratError | None = None) -> None:
        """Cancels steps that have not begun, and gives their elements back to the
        datasets."""
        now = self.clock()
        prepared, queued = self.pipeline.cancelled()
        # Last one first: each gives its elements back in front of those that were given
        # back before it, so the dataset yields them in the order of the closures again.
        for step in prepared:
            self._give_back(step)
        self.resources.expect_no_leases()
        for step in (*reversed(prepared), *queued):
            self.pipeline.leave(_closure.cancelled(step.number, error), now)

    def build(self, order: BuildResource) -> LayoutMessage:
        """Builds a resource in the worker's context; see `Resources.build`."""
        before = worker_context.set(WorkerContext(self._index, self._count))
        building_before = building.set(True)
        # Pipelines may be fewer than workers: the dataset function then sees the share
        # of the pipeline, not of the worker.
        share = (order.pipeline, order.pipelines) if order.pipelines else None
        share_before = input_pipeline.set(share)
        creator_before = creator.set(_Refusing())
        try:
            return self.resources.build(order)
        finally:
            input_pipeline.reset(share_before)
            building.reset(building_before)
            creator.reset(creator_before)
            worker_context.reset(before)

    def capture(self, yes: bool) -> None:
        """Sets whether the times of each single step are recorded. From any thread."""
        self.pipeline.is_captured = yes

    def close(self) -> None:
        """Drops the remaining steps and their resources, without reports."""
        self.pipeline.cancelled()
        self.pipeline.post()
        self.resources.close()

    # Work

    def prepare(self, step: ClosureStep, began: float) -> float:
        task: _Task = step.task
        # Nothing of such a step depends on when it is prepared, so that costs no time
        # and the clock is not read.
        if task.once is not None:
            step.work, needs = task.once
            step.needs = needs
            self.pipeline.prepared(
                step,
                began,
                reads=needs.reads,
                nbytes=needs.nbytes,
                writes=needs.writes,
                optimizes=needs.optimizes,
            )
            return began
        before = worker_context.set(task.context)
        self.pipeline.preparing = step, began
        try:
            function = self.resources.code(task.function)
            # An eager step has no plan: it reads and pushes while it runs. All before
            # it has to be posted by then, and nothing after it may be pulled early.
            if function.eager:
                # Loaded now, so an argument that cannot be built refuses the step
                # before it runs.
                self.resources.arguments(task.arguments)
                self.pipeline.prepared(step, began, writes=True, alone=True)
                return began
            args, kwargs = self._arguments(task)
            leased = self.resources.begin_leases(task.leases) if task.leases else ()
            exchanges = window_of(function)
            if exchanges is not None:
                # Its place decides which fragment it exchanges, and that is part of the
                # program, so the place is taken before the program is chosen.
                step.place = self.resources.residents.take_place(exchanges)
                kwargs = {**kwargs, SEGMENT: step.place.segment}
            prepared = self._prepare(function, args, kwargs)
            if leased:
                _require_drawn(leased, prepared)
            needs = self._catalog.of(prepared.plan)
            # Now and not when it pushes: the servers trace the trees while this thread
            # compiles the program of the first step.
            if prepared.plan.calls:
                self._begin_binding(prepared)
        except BaseException as error:  # to the coordinator, as the outcome of the step
            self._give_back(step)
            now = self.clock()
            self.pipeline.refused(step, _closure.failed(step.number, error), now)
            return now
        finally:
            self.pipeline.preparing = None
            worker_context.reset(before)
        step.work, step.needs = prepared, needs
        reads, nbytes = needs.reads, needs.nbytes
        if prepared.plan.has_lookups:
            # The rows to pull depend on the ids of this step, so its pull is never
            # shared.
            reads, nbytes = self._catalog.wanted(needs, prepared.wanted)
        elif not prepared.plan.draws and not needs.rounds:
            task.once = (prepared, needs)
        if needs.rounds and reads is not None and task.context.attempt > 1:
            # Others may wait for its round, to which this worker has contributed.
            reads = reads._replace(waits=False)
        now = self.clock()
        self.pipeline.prepared(
            step,
            now,
            cost=now - began,
            reads=reads,
            nbytes=nbytes,
            levels=needs.advances,
            writes=needs.writes,
            optimizes=needs.optimizes,
            begins=needs.has_residents and prepared.may_begin,
            examples=prepared.examples if prepared.plan.draws else 0,
        )
        return now

    def _arguments(self, task: _Task) -> Arguments:
        arguments = self.resources.arguments(task.arguments)
        return fill_inputs(arguments, task.inputs) if task.inputs else arguments

    def _begin_binding(self, prepared: Prepared) -> None:
        """Starts to register the trees of a plan's optimizers on the servers, once per
        plan. If that fails, gives the elements of the step back."""
        plan = prepared.plan
        if plan in self._bound:
            return
        try:
            self._bound[plan] = [self._bind(call) for call in plan.calls]
        except BaseException:  # to the step, whose outcome it is
            # `prepare` has not set ``step.work`` yet, so nobody else gives these
            # elements back.
            prepared.unread()
            raise

    def _require_bound(self, prepared: Prepared) -> None:
        """Waits until the servers have traced the trees of a plan. If one refuses a
        tree, the next step sends the trees again, also if that step was prepared
        before.

        Raises:
            _NotBoundError: A server has refused a tree; the cause is the server's
                error.
        """
        plan = prepared.plan
        if not plan.calls:
            return
        self._begin_binding(prepared)
        # The servers had the time of the compilation, so this rarely waits.
        left = self._bound[plan]
        for binding in left:
            if (error := binding.exception()) is not None:
                del self._bound[plan]
                raise _NotBoundError from error
        left.clear()

    def begin(self, step: ClosureStep, began: float) -> float:
        """Computes the part of a window of local steps that needs no pulled values."""
        residents = self.resources.residents
        try:
            if self._has_copies(step):
                # No value is pulled yet. The round is the one that the worker expects;
                # if another one is open, `run` begins again (`forget_begun`).
                plan: Plan = step.work.plan
                early = residents.early(plan.reads, step.number, step.place)
                step.work.begin(early)
                self._begun_with = residents.version
        except Exception:  # raised again when it runs, which ends the step
            step.work.forget_begun()
        now = self.clock()
        self.pipeline.begun(step, now - began)
        return now

    def advance(self, step: ClosureStep, began: float) -> float:
        task: _Task = step.task
        before = worker_context.set(task.context)
        try:
            wanted = step.work.advance(step.values or ())
            assert wanted is not None, "a plan has one level less than it says"
            needs: Needs = step.needs
            reads, nbytes = self._catalog.wanted(needs, wanted)
            # The rows made of the last answer wait with the step.
            nbytes += needs.blocks[needs.advances - step.levels]
        except BaseException as error:  # to the coordinator, as the outcome
            self.pipeline.broke(step, _closure.failed(step.number, error))
            return self.clock()
        finally:
            worker_context.reset(before)
        now = self.clock()
        self.pipeline.advanced(step, now, cost=now - began, reads=reads, nbytes=nbytes)
        return now

    def run(self, step: ClosureStep, began: float) -> float:
        push: list[PsUpdate] | RoundPush | None = None
        lent: Sequence[Lent] = ()
        notes: EagerNotes | None = None
        storage: Direct | None = None
        kept: list[StepUpdate] = []
        if step.ending is not None:
            ending = step.ending
        elif step.error is not None:
            ending = self._not_run(step, step.error)
        elif not self._has_copies(step):
            self._draw_again(step)
            # Retryable: another worker may have the copy, and the next window here
            # takes all values again.
            ending = _closure.cancelled(step.number, BusyError(_NO_COPY))
        else:
            task: _Task = step.task
            before = worker_context.set(task.context)
            try:
                if step.work is None:
                    notes = EagerNotes()
                    storage = self._eager_storage(step, task, notes)
                    result = self._eager(task, notes, storage)
                else:
                    # Computed before the trees are awaited: the servers trace them
                    # meanwhile.
                    result, kept = self._computed(step)
                    self._require_bound(step.work)
                    push, lent = self.pushes.push_of(step, result)
                # What can still fail comes before anything has an effect: the result
                # must fit a message before the resident arrays change and the push
                # leaves.
                ending = self._layouts.ok(step.number, result)
                ending.lent = lent
                if task.leases:
                    ending.leases = self.resources.to_note(task.leases)
                if kept:
                    self.resources.residents.put(step.number, kept, step.place)
            except _NotBoundError as error:
                ending = self._not_run(step, error.__cause__ or error)
            except BaseException as error:  # to the coordinator, as the outcome
                # An eager step sends updates before it ends, and its examples must not
                # be leased again then, whatever it raises.
                pushed = storage is not None and (
                    storage.has_pushed or isinstance(error, ZstratError)
                )
                ending = _closure.failed(step.number, error, pushed=pushed)
                # A step that fails has no effect, so what was to be pushed is dropped
                # and its residuals return.
                push = None
                self.encoding.residuals.settle(lent, is_sent=False)
                if step.place is not None:
                    self.resources.residents.lose_copies(step.place)
            finally:
                worker_context.reset(before)
        now = self.clock()
        cost = now - began + step.begun
        if step.place is not None and push is not None:
            self._measure(step, cost)
        # An ending may wait long for its acknowledgement; the values of the step must
        # not wait with it.
        step.work = step.values = None
        self.pipeline.ran(step, ending, now, cost=cost, push=push, eager=notes)
        return now

    def _give_back(self, step: ClosureStep) -> None:
        """Gives back the elements, and the place among windows, of a step that will not
        run. Of several steps, call this for the last one first."""
        if step.work is not None:
            step.work.unread()
        if step.place is not None:
            self.resources.residents.give_back(step.place)
            step.place = None

    def _measure(self, step: ClosureStep, seconds: float) -> None:
        """Records the speed of a window of local steps, unless its program was compiled
        during the run."""
        plan: Plan = step.work.plan
        if plan in self._compiled:
            self.resources.residents.took(step.place, seconds)
        self._compiled.add(plan)

    def _has_copies(self, step: ClosureStep) -> bool:
        """Returns whether this worker has the copies of variables that a window of
        local steps continues."""
        if step.place is None:
            return True
        reads = step.work.plan.reads
        return self.resources.residents.may_run(step.number, step.place, reads)

    def _computed(self, step: ClosureStep) -> tuple[StepResult, list[StepUpdate]]:
        """Computes a step; returns its result, and separately the updates of resident
        arrays, which stay on this worker."""
        needs: Needs = step.needs
        if not needs.has_residents:
            return step.work.run(step.values or ()), []
        plan: Plan = step.work.plan
        residents = self.resources.residents
        read = {} if step.notes is None else step.notes.rounds or {}
        optimizer = needs.rounds[0]
        at = RoundNumber(optimizer, read.get(optimizer, 0))
        values = residents.filled(plan.reads, step.values or (), step.number, at)
        # The first part was computed with other arrays or with another round than now.
        if self._begun_with != residents.version:
            step.work.forget_begun()
        result = step.work.run(values)
        kept = [update for update in result.updates if update.spec.ps == RESIDENT]
        shared = [update for update in result.updates if update.spec.ps != RESIDENT]
        return result._replace(updates=shared), kept

    def _eager_storage(
        self, step: ClosureStep, task: _Task, notes: EagerNotes
    ) -> Direct:
        attempt, to_note = task.context.attempt, self.resources.to_note(task.leases)
        run = EagerRun(step.number, attempt, task.low_water, to_note)
        return self._storage(run, notes)

    def _eager(self, task: _Task, notes: EagerNotes, storage: Direct) -> StepResult:
        function = self.resources.code(task.function)
        args, kwargs = self._arguments(task)
        draw = partial(self._draw, notes)
        leased = self.resources.begin_leases(task.leases)
        result = self._run_eager(function, args, kwargs, storage, draw)
        for iterator in leased:
            iterator.require_drawn()
        storage.finish()
        return result

    def _draw(self, notes: EagerNotes, iterator: StepIterator) -> Any:
        began = self.clock()
        element = iterator.draw()
        notes.spent(Phase.DRAW, began, self.clock())
        notes.examples += examples_in(element)
        return element

    def _not_run(self, step: ClosureStep, error: BaseException) -> Ending:
        """Returns the ending of a step whose values could not be pulled, or for which a
        server has refused an optimizer's tree. The coordinator may retry the closure.
        """
        self._draw_again(step)
        return _closure.failed(step.number, error)

    def _draw_again(self, step: ClosureStep) -> None:
        """Gives back the elements, and the place among windows, of the head of the
        line, after those of later steps, which are prepared once more."""
        # Places, too, are given back last one first, whether or not windows draw.
        has_place = step.place is not None
        if step.work is not None and (step.work.plan.draws or has_place):
            for other in self.pipeline.put_back():
                self._give_back(other)
                other.work = None
        self._give_back(step)
        step.work = None


_NO_COPY: Final = (
    "this worker has no copy of the variables, as the window before has failed"
)


class _NotBoundError(Exception):
    """A server has refused the tree of an optimizer."""


class _Refusing:
    """Refuses to create variables while a resource is built: a variable of the worker's
    process would not be part of the model."""

    def create_variables(self, requests: Sequence[VariableRequest]) -> list[Variable]:
        names = ", ".join(repr(request.name) for request in requests)
        raise ValueError(
            f"a dataset function creates variable {names} on a worker: create it on "
            "the coordinator, inside strategy.scope()"
        )

    def register_optimizer(self, optimizer: OptimizerHandle) -> int:
        raise ValueError(
            f"a dataset function creates optimizer {optimizer.name!r} on a worker: "
            "create it on the coordinator, inside strategy.scope()"
        )

    def forget_optimizer(self, optimizer: int) -> None:
        raise ValueError(f"optimizer {optimizer} was not created on this worker")


def _require_drawn(leased: Sequence[LeasedIterator], prepared: Prepared) -> None:
    """Checks that a prepared step has drawn all its leases; gives its elements back if
    not."""
    try:
        for iterator in leased:
            iterator.require_drawn()
    except RuntimeError:
        prepared.unread()
        raise
