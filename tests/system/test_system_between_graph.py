"""Programs that share real parameter servers without a coordinator."""

import json
import subprocess
import threading

import numpy as np
import optax
import pytest
from programs import Program

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.testing import ThreadCluster

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]


@pytest.fixture(scope="module")
def local():
    with ThreadCluster(num_ps=2, num_workers=0) as cluster:
        yield cluster


@pytest.fixture
def spec(local):
    """The ps of the cluster, and workers that listen nowhere."""
    ps = local.spec.job_tasks("ps")
    return {"ps": ps, "worker": ["localhost:1", "localhost:2"]}


def program(spec, task, **options):
    resolver = zs.cluster_resolver.SimpleClusterResolver(
        zs.ClusterSpec(spec), task_type="worker", task_id=task
    )
    return zs.BetweenGraphStrategy(resolver, **options)


def created(strategy):
    with strategy.scope():
        a = zs.Variable(np.float32(1), name="a")
        b = zs.Variable(zs.initializers.normal(0.1), shape=(4, 3), name="b")
        optimizer = zs.Optimizer(optax.sgd(0.5))
        c = zs.Variable(np.zeros(2, np.float32), name="c")
    return a, b, c, optimizer


def test_a_checkpoint_says_that_the_other_programs_went_on(spec, tmp_path, caplog):
    with program(spec, 0) as chief:
        a, *_ = created(chief)
        path = zs.Checkpoint(a=a).save(tmp_path / "c")
        a.assign(7.0)
        zs.Checkpoint(a=a).restore(path)
        assert a.numpy() == 1.0
    manifest = json.loads((tmp_path / "c-1" / "manifest.json").read_bytes())
    assert manifest["manifest"]["metadata"]["steps"] == [None]
    assert "is not one moment of the training: other programs update" in caplog.text


def test_a_session_that_a_coordinator_has_for_itself_is_not_joined(tmp_path):
    """Its checkpoints are cuts, as nobody else updates what is in it."""
    with ThreadCluster(num_ps=1, num_workers=1) as other:
        with zs.ParameterServerStrategy(other.resolver) as strategy:
            with strategy.scope():
                v = zs.Variable(1.0)
            ps = other.spec.job_tasks("ps")
            jobs = {"ps": ps, "worker": ["localhost:1", "localhost:2"]}
            with pytest.raises(
                zs.errors.InvalidArgumentError, match="BetweenGraphStrategy"
            ):
                program(jobs, 1)
            zs.Checkpoint(v=v).save(tmp_path / "c")
    manifest = json.loads((tmp_path / "c-1" / "manifest.json").read_bytes())
    assert manifest["manifest"]["metadata"]["steps"] != [None]


def test_the_first_program_creates_and_the_others_join(spec):
    with program(spec, 0) as chief:
        mine = created(chief)
        with program(spec, 1) as other:
            theirs = created(other)
            for first, second in zip(mine[:3], theirs[:3], strict=True):
                assert first.spec == second.spec
                np.testing.assert_array_equal(first.numpy(), second.numpy())
            assert [v.spec.ps for v in mine[:3]] == [0, 1, 0]
            theirs[0].assign_add(2.0)
            assert mine[0].numpy() == 3.0
            mine[3].apply_gradients([(np.ones(2, np.float32), mine[2])])
            theirs[3].apply_gradients([(np.ones(2, np.float32), theirs[2])])
            assert mine[2].numpy().tolist() == [-1.0, -1.0]


def test_rounds_are_refused_as_nobody_would_close_them(spec):
    with program(spec, 0) as chief, program(spec, 1) as other:
        for strategy in (chief, other):
            with (
                strategy.scope(),
                pytest.raises(ValueError, match="ClusterCoordinator"),
            ):
                zs.Optimizer(optax.sgd(0.5), rounds=zs.Rounds())
        mine, theirs = created(chief), created(other)  # the refused one has no number
        assert mine[3].id == theirs[3].id


def test_what_the_first_program_has_not_created_is_waited_for(spec):
    seen = []

    def other():
        with program(spec, 1) as strategy:
            a, b, _, _ = created(strategy)
            seen.append((a.numpy(), b.shape))

    thread = threading.Thread(target=other)
    thread.start()
    with program(spec, 0) as chief:
        created(chief)[0].read_value()
        thread.join()
    assert seen == [(1.0, (4, 3))]


def test_steps_of_both_programs_count(spec):
    with program(spec, 0) as chief, program(spec, 1) as other:
        strategies = chief, other
        variables = []
        for strategy in strategies:
            with strategy.scope():
                variables.append(zs.Variable(np.zeros(3, np.float32)))

        def train(strategy, v):
            @zs.function
            def step():
                return strategy.run(
                    lambda: v.assign_add(np.ones(3, np.float32)).value()
                )

            for _ in range(20):
                step()

        threads = [
            threading.Thread(target=train, args=each)
            for each in zip(strategies, variables, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert variables[0].numpy().tolist() == [40.0] * 3


def test_what_is_there_stays_when_a_program_ends(spec):
    chief = program(spec, 0)
    created(chief)
    with program(spec, 1) as other:
        a, *_ = created(other)
        chief.close()
        a.assign_add(1.0)
        assert a.numpy() == 2.0
        # The next chief starts afresh, and who was there is told so.
        with program(spec, 0) as again:
            b, *_ = created(again)
            assert b.numpy() == 1.0
            with pytest.raises((zs.StaleSessionError, zs.PSUnavailableError)):
                a.assign_add(1.0)


def test_duties_and_places(spec):
    with program(spec, 0) as chief, program(spec, 1) as other:
        for strategy, is_chief in ((chief, True), (other, False)):
            extended = strategy.extended
            assert extended.experimental_between_graph
            assert extended.experimental_should_init is is_chief
            assert extended.should_checkpoint is is_chief
            assert extended.should_save_summary is is_chief
            assert extended.parameter_devices == ("/job:ps/task:0", "/job:ps/task:1")
        assert other.extended.worker_devices[0] == (
            "/job:worker/replica:0/task:1/device:CPU:0"
        )
        with chief.scope():
            v, w = zs.Variable(1.0), zs.Variable(1.0)
            with chief.extended.colocate_vars_with(w):
                beside = zs.Variable(2.0)
        assert v.device == "/job:ps/replica:0/task:0/device:CPU:0"
        assert beside.device == w.device == "/job:ps/replica:0/task:1/device:CPU:0"
        assert not other.extended.variable_created_in_scope(w)


def test_a_program_without_a_chief_says_who_is_missing(spec):
    settings = Settings(timeouts=Timeouts(connect=0.2))
    with ThreadCluster(num_ps=1, num_workers=0) as fresh:  # no chief has left anything
        spec |= {"ps": fresh.spec.job_tasks("ps")}
        with pytest.raises(zs.DeadlineExceededError, match="worker 0"):
            program(spec, 1, settings=settings)


@pytest.mark.parametrize(
    ("job", "task", "words"),
    [
        (None, None, r"`task_type`.*`task_id`"),
        ("worker", None, r"`task_type`.*`task_id`"),
        ("ps", 0, r"zs\.Server"),
        ("worker", 7, "`task_id`"),
    ],
)
def test_which_program_this_is_must_be_clear(spec, job, task, words):
    resolver = zs.cluster_resolver.SimpleClusterResolver(
        zs.ClusterSpec(spec), task_type=job, task_id=task
    )
    with pytest.raises(ValueError, match=words):
        zs.BetweenGraphStrategy(resolver)


@pytest.mark.parametrize(
    "option",
    [{"replicas": 1}, {"stores_per_ps": 2}, {"on_ps_loss": "restore"}, {"resume": "x"}],
    ids=str,
)
def test_what_needs_a_coordinator_is_refused(spec, option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}=.*ParameterServerStrategy"):
        program(spec, 0, **option)


@pytest.mark.parametrize("option", [{"rounds": zs.Rounds()}, {"wire": "int8"}], ids=str)
def test_optimizers_that_need_scheduled_steps_are_refused(spec, option):
    (name,) = option
    with program(spec, 0) as chief, chief.scope():
        with pytest.raises(ValueError, match=f"{name}=.*ParameterServerStrategy"):
            zs.Optimizer(optax.sgd(0.5), **option)
        assert created(chief)


IMPATIENT = Settings(timeouts=Timeouts(request=0.3))


def variable(strategy, value, name):
    with strategy.scope():
        return zs.Variable(np.asarray(value, np.float32), name=name)


def test_who_gave_up_waiting_asks_for_the_same_again(spec):
    # The other's own requests are short, so it is its handles that are compared.
    with program(spec, 0) as chief, program(spec, 1, settings=IMPATIENT) as other:
        with other.scope():
            for _ in range(2):
                with pytest.raises(
                    zs.DeadlineExceededError,
                    match=r"'a'.*\[2\]",
                ):
                    zs.Variable(np.zeros(2, np.float32), name="a")
            with pytest.raises(zs.DeadlineExceededError, match="'sgd'"):
                zs.Optimizer(optax.sgd(0.5), name="sgd")
        values = {"a": [1, 1], "b": [2, 2, 2], "c": [3]}
        theirs = [variable(chief, value, name) for name, value in values.items()]
        with chief.scope():
            optimizer = zs.Optimizer(optax.sgd(0.5), name="sgd")
        for made, (name, value) in zip(theirs, values.items(), strict=True):
            mine = variable(other, np.zeros_like(value), name)
            assert mine.spec == made.spec
        with other.scope():
            assert zs.Optimizer(optax.sgd(0.5), name="sgd").id == optimizer.id


def refused_initializer(shape, dtype, partition_shape, partition_offset):
    raise RuntimeError("no value")


def test_what_a_server_refused_counts_for_nobody(spec):
    with program(spec, 0) as chief, program(spec, 1) as other:

        def broken(params):
            raise RuntimeError("no state")

        x = variable(chief, [7], "x")
        with chief.scope():
            with pytest.raises(
                ValueError, match=r"'Optimizer'.*RuntimeError.*zs\.Optimizer"
            ):
                zs.Optimizer(optax.GradientTransformation(broken, broken), params=x)
            with pytest.raises(zs.InvalidArgumentError):
                zs.Variable(refused_initializer, shape=(3,), dtype="float32")
            theirs = zs.Optimizer(optax.sgd(0.5))
        assert variable(other, [0], "x").numpy().tolist() == [7]
        assert x.device == "/job:ps/replica:0/task:0/device:CPU:0"
        with other.scope():
            mine = zs.Optimizer(optax.sgd(0.5))
        assert mine.id == theirs.id


def test_what_came_too_late_gives_its_value_to_nobody(spec, monkeypatch):
    with program(spec, 0) as chief, program(spec, 1) as other:
        servers = chief._session.servers
        create, optimize = servers.create_variables, servers.create_optimizer

        def too_late(method):
            async def called(*args):
                await method(*args)
                raise zs.DeadlineExceededError("too late")

            return called

        with monkeypatch.context() as patch, chief.scope():
            patch.setattr(servers, "create_variables", too_late(create))
            patch.setattr(servers, "create_optimizer", too_late(optimize))
            with pytest.raises(zs.DeadlineExceededError):
                zs.create_variables({"a": np.ones(2, "f4"), "b": np.ones(3, "f4")})
            with pytest.raises(zs.DeadlineExceededError):
                zs.Optimizer(optax.sgd(0.5))
        x = variable(chief, [7, 7], "x")
        y = variable(chief, [8, 8, 8], "y")
        assert (x.numpy().tolist(), y.numpy().tolist()) == ([7, 7], [8, 8, 8])
        mine = variable(other, [0, 0], "x")
        assert mine.spec == x.spec
        with chief.scope():
            optimizer = zs.Optimizer(optax.sgd(1.0))  # and not the one of 0.5
        with other.scope():
            zs.Optimizer(optax.sgd(1.0)).apply_gradients([(np.ones(2, "f4"), mine)])
        optimizer.apply_gradients([(np.ones(2, "f4"), x)])
        assert x.numpy().tolist() == [5, 5]


def test_another_order_is_refused_and_the_right_one_is_taken(spec):
    with program(spec, 0) as chief, program(spec, 1) as other:
        p = variable(chief, [1, 2], "p")
        q = variable(chief, [[9, 9]], "q")
        with pytest.raises(
            zs.InvalidArgumentError,
            match=r"'q'.*\[1, 2\].*'p'",
        ):
            variable(other, [[0, 0]], "q")
        assert variable(other, [0, 0], "p").numpy().tolist() == p.numpy().tolist()
        assert variable(other, [[0, 0]], "q").numpy().tolist() == q.numpy().tolist()


def test_there_must_be_a_ps():
    resolver = zs.cluster_resolver.SimpleClusterResolver(
        zs.ClusterSpec({"worker": ["localhost:1"]}), task_type="worker", task_id=0
    )
    with pytest.raises(ValueError, match="`ps`"):
        zs.BetweenGraphStrategy(resolver)


PROGRAM = """
import json, os, sys
os.environ["TF_CONFIG"] = sys.argv[1]
import numpy as np
import zstrat as zs

strategy = zs.BetweenGraphStrategy()
with strategy.scope():
    v = zs.Variable(np.float32(0))
    done = zs.Variable(np.float32(0))
v.assign_add(np.float32(1 + json.loads(sys.argv[1])["task"]["index"]))
done.assign_add(np.float32(1))
print("waiting", flush=True)
sys.stdin.readline()
print(float(v.numpy()), float(done.numpy()), flush=True)
strategy.close()
"""


def test_programs_in_processes_of_their_own(spec):

    def start(index):
        config = {"cluster": spec, "task": {"type": "worker", "index": index}}
        return Program(
            ["-c", PROGRAM, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    programs = [start(1), start(0)]
    try:
        for each in programs:
            assert each.stdout.readline() == "waiting\n"
        for each in programs:
            out, _ = each.communicate("go\n", timeout=60)
            assert out == "3.0 2.0\n"
            assert each.returncode == 0
    finally:
        for each in programs:
            each.kill()
            each.communicate()
