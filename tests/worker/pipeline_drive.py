"""Obeys a pipeline in tests, by numbers."""

from __future__ import annotations

from zstrat.worker import Costs, Do

W = "weights"


class Drive:
    """Obeys a pipeline at a clock of its own; every piece of work takes ``cost``."""

    def __init__(self, pipeline, cost=10e-6):
        self.pipeline, self.cost, self.now = pipeline, cost, 0.0
        self.did, self.posts = [], []

    def dispatch(self, numbers, *, reads=None, nbytes=8, **facts):
        plan = {"reads": reads, "nbytes": nbytes, **facts}
        costs = Costs(prepare=self.cost, run=self.cost)
        self.pipeline.dispatched(plan, costs, numbers, self.now)

    def turn(self):
        """Does the next thing; False if that is to wait."""
        do, step = self.pipeline.next(self.now)
        if do is Do.WAIT:
            return False
        if do is Do.POST:
            self.posts.append(self.pipeline.post())
            self.did.append("post")
            return True
        self.now += self.cost
        if do is Do.PREPARE:
            self.prepare(step, **step.task)
            self.did.append(f"prepare {step.number}")
        elif do is Do.ADVANCE:
            reads = (step.number, step.levels)
            self.pipeline.advanced(
                step, self.now, cost=self.cost, reads=reads, nbytes=step.nbytes
            )
            self.did.append(f"advance {step.number}")
        elif do is Do.BEGIN:
            self.pipeline.begun(step, self.cost)
            self.did.append(f"begin {step.number}")
        else:
            push = f"push {step.number}" if step.writes else None
            self.pipeline.ran(step, step.number, self.now, cost=self.cost, push=push)
            self.did.append(f"run {step.number}")
        self.pipeline.validate()
        return True

    def prepare(self, step, reads=None, levels=None, **facts):
        if levels is not None:  # it looks up rows: what it reads is its own
            reads, facts["levels"] = (step.number, levels), levels
        self.pipeline.prepared(step, self.now, cost=self.cost, reads=reads, **facts)

    def rest(self):
        """Until there is nothing to do; the posts that this made."""
        self.did, self.posts = [], []
        while self.turn():
            pass
        return self.posts

    def arrive(self, post):
        for pull in post.pulls:
            self.pipeline.arrived(pull, "values", self.now)


def pulled(post):
    return [[step.number for step in pull.steps] for pull in post.pulls]


def optimizer_steps(drive, *numbers):
    drive.dispatch(numbers, reads=W, writes=True, optimizes=True)
