"""The tasks of a Slurm step, as srun tells them, and their GPUs: who has distributed
them, and what a second resolver finds."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.cluster import (
    ClusterSpec,
    SlurmClusterResolver,
    _gpu_shares,
    expand_hostlist,
)

FOUR = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "t02n[13,41]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


@pytest.fixture(autouse=True)
def srun(monkeypatch, tmp_path):
    """Gives this process the environment of a task, and no GPU."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is put back
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(*others, **more):
        for env in (*others, more):
            for name, value in env.items():
                monkeypatch.setenv(name, str(value))

    return put


@pytest.fixture
def nvidia_smi(tmp_path):
    def install(output, status=0):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\ntest \"$1\" = --list-gpus || exit 9\n"
                        f"echo '{output}'\nexit {status}\n")  # fmt: skip
        path.chmod(0o755)

    return install


def test_all_tasks_are_workers_by_default(srun):
    srun(FOUR, SLURM_PROCID=3)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec(
        {"worker": ["t02n13:8888", "t02n13:8889", "t02n41:8888", "t02n41:8889"]}
    )
    assert resolver.get_task_info() == ("worker", 3)
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.master() == "grpc://t02n41:8889"
    assert resolver.num_accelerators() == {}
    assert resolver.environment == ""
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_jobs_take_ranks_in_the_order_of_their_names(srun):
    jobs = {"worker": 2, "ps": 1, "chief": 1}
    tasks = []
    for rank in range(4):
        srun(FOUR, SLURM_PROCID=rank)
        resolver = SlurmClusterResolver(jobs, port_base=2222, rpc_layer=None)
        tasks.append(resolver.get_task_info())
        assert resolver.cluster_spec().as_dict() == {
            "chief": ["t02n13:2222"],
            "ps": ["t02n13:2223"],
            "worker": ["t02n41:2222", "t02n41:2223"],
        }
    assert tasks == [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
    assert resolver.master("ps", 0) == "t02n13:2223"
    assert resolver.master("ps", 0, "tcp") == "tcp://t02n13:2223"
    resolver.task_type = None
    assert resolver.master() == ""
    with pytest.raises(ValueError, match=r"\b5\b.*'ps'"):
        resolver.master("ps", 5)


def test_hosts_are_in_the_order_of_slurms_ranks(srun):
    srun(FOUR, SLURM_STEP_NODELIST="n[9-10],m1", SLURM_STEP_TASKS_PER_NODE="1,2,1")
    assert SlurmClusterResolver().cluster_spec().as_dict() == {
        "worker": ["m1:8888", "n9:8888", "n10:8888", "n10:8889"]
    }


def test_nodes_are_ordered_as_slurm_numbers_them(srun):
    listed, ordered = (
        "b1,n[9-12],n[07-08],a[8-11]x3,a",
        "a,a[8-11]x3,b1,n[07-08],n[9-12]",
    )
    step = {"SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "1(x12)"}
    for nodes in (listed, ordered):
        srun(FOUR, step, SLURM_STEP_NODELIST=nodes)
        assert SlurmClusterResolver().cluster_spec().job_tasks("worker") == [
            f"{host}:8888" for host in expand_hostlist(ordered)
        ]


@pytest.mark.parametrize("tasks", [2, {"t02n41": 2, "t02n13": 2}])
def test_tasks_per_node_may_be_given(srun, tasks):
    srun(FOUR, SLURM_STEP_TASKS_PER_NODE="nonsense")
    spec = SlurmClusterResolver(tasks_per_node=tasks).cluster_spec()
    assert spec.job_tasks("worker")[2] == "t02n41:8888"


def test_variables_of_the_job_do_where_the_step_has_none(
    srun,
):
    srun(SLURM_STEP_ID=0, SLURM_PROCID=0, SLURM_NTASKS=3, SLURM_NODELIST="n[1-2]")
    srun(SLURM_TASKS_PER_NODE="2,1")
    spec = SlurmClusterResolver().cluster_spec()
    assert spec.as_dict() == {"worker": ["n1:8888", "n1:8889", "n2:8888"]}


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": 2**32 - 5}])
def test_a_batch_script_is_no_task(srun, step):
    srun(step, SLURM_PROCID=0, SLURM_NTASKS=3, SLURM_NODELIST="n[1-2]")
    srun(SLURM_TASKS_PER_NODE="2,1")
    with pytest.raises(RuntimeError, match=r"not one of the 3 tasks.*with srun"):
        SlurmClusterResolver({"ps": 1, "worker": 2})


def test_two_jobs_on_a_node_have_ports_of_their_own(srun):
    def ports(job, step):
        srun(FOUR, SLURM_JOB_ID=job, SLURM_STEP_ID=step)
        return set(map(str, SlurmClusterResolver().cluster_spec().job_tasks("worker")))

    seen = [ports(job, step) for job in range(4_999_990, 5_000_010) for step in (0, 1)]
    assert len(set.union(*seen)) == sum(map(len, seen))
    for address in set.union(*seen):
        assert 10_240 <= int(address.rpartition(":")[2]) < 32_768


@pytest.mark.parametrize("missing", FOUR)
def test_a_missing_variable(srun, monkeypatch, missing):
    srun(FOUR)
    monkeypatch.delenv(missing)
    with pytest.raises(RuntimeError, match=f"^{missing} not found in environment"):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SLURM_PROCID", "x", r"SLURM_PROCID.*\b0\b.*'x'"),
        ("SLURM_PROCID", "-1", "SLURM_PROCID"),
        ("SLURM_STEP_NUM_TASKS", "", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_STEP_NODELIST", "n[1", "SLURM_STEP_NODELIST"),
        (
            "SLURM_STEP_TASKS_PER_NODE",
            "2x",
            "SLURM_STEP_TASKS_PER_NODE",
        ),
        ("SLURM_PROCID", "9" * 5000, r"SLURM_PROCID.*\b0\b"),
    ],
)
def test_a_variable_that_cannot_be_read(srun, name, value, words):
    srun(FOUR, **{name: value})
    with pytest.raises(ValueError, match=words):
        SlurmClusterResolver()


@pytest.mark.parametrize("number", [10**13, {"n1": 10**13}])
def test_more_tasks_than_a_cluster_has(srun, number):
    srun(FOUR)
    with pytest.raises(RuntimeError, match=r"SLURM_STEP_TASKS_PER_NODE.*tasks_per"):
        SlurmClusterResolver(tasks_per_node=number)
    srun(SLURM_STEP_NODELIST="n1", SLURM_STEP_TASKS_PER_NODE=str(10**13))
    with pytest.raises(RuntimeError, match=r"\b65536\b"):
        SlurmClusterResolver()


def test_tasks_that_do_not_add_up(srun):
    srun(FOUR)
    words = r"\b5\b.*\b4\b"
    with pytest.raises(RuntimeError, match=words):
        SlurmClusterResolver({"ps": 2, "worker": 3})
    words = r"\b1\b.*\b4\b"
    with pytest.raises(RuntimeError, match=words):
        SlurmClusterResolver({"worker": 1})
    srun(SLURM_PROCID=4)
    with pytest.raises(RuntimeError, match=r"SLURM_PROCID=4.*\b4\b"):
        SlurmClusterResolver()
    srun(SLURM_STEP_TASKS_PER_NODE="2(x3)")
    with pytest.raises(RuntimeError, match=r"\b3\b.*SLURM_STEP_NODELIST.*\b2\b"):
        SlurmClusterResolver()


def test_ranks_that_slurm_dealt_out_in_another_order(
    srun,
):
    srun(FOUR, SLURM_PROCID=1, SLURMD_NODENAME="t02n13", SLURM_LOCALID=1)
    assert SlurmClusterResolver().master() == "grpc://t02n13:8889"
    srun(SLURMD_NODENAME="t02n41", SLURM_LOCALID=0)
    words = r"rank 1.*\b0\b.*\b1\b"
    with pytest.raises(RuntimeError, match=words):
        SlurmClusterResolver()
    srun(SLURMD_NODENAME="another-name")
    assert SlurmClusterResolver().master() == "grpc://t02n13:8889"


@pytest.mark.parametrize(
    ("visible", "rank", "options", "gpus", "share"),
    [
        ("0,1,2,3", 0, {}, 2, "0,1"),
        ("0,1,2,3", 3, {}, 2, "2,3"),
        ("0,1,2,3", 3, {"gpus_per_task": 1}, 1, "1"),
        ("4,5,6,7", 1, {}, 2, "6,7"),  # the others belong to somebody else
        ("GPU-a,GPU-b", 1, {}, 1, "GPU-b"),
        ("0,1,2", 1, {}, 1, "1"),
        ("0,1,2,3", 1, {"gpus_per_node": 2}, 1, "1"),
        (None, 1, {"gpus_per_node": 8}, 4, "4,5,6,7"),
        ("3", 1, {"gpus_per_node": 2}, 1, "3"),  # Slurm has distributed them
        ("0", 1, {}, 0, "0"),
        ("", 1, {}, 0, ""),
        ("-1", 1, {}, 0, "-1"),
        ("NoDevFiles", 1, {}, 0, "NoDevFiles"),
        (None, 1, {}, 0, None),
        ("0,1,2,3", 1, {"auto_set_gpu": False}, 2, "0,1,2,3"),
        ("0,1,2,3", 1, {"gpus_per_task": 0}, 0, "0,1,2,3"),
    ],
)
def test_share_of_a_task(
    srun,
    visible,
    rank,
    options,
    gpus,
    share,
):
    srun(FOUR, SLURM_PROCID=rank)
    if visible is not None:
        srun(CUDA_VISIBLE_DEVICES=visible)
    resolver = SlurmClusterResolver(**options)
    assert resolver.num_accelerators() == ({"GPU": gpus} if gpus else {})
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == share


def test_more_gpus_than_there_are(srun):
    srun(FOUR, CUDA_VISIBLE_DEVICES="0,1,2,3")
    words = "GPUs"
    with pytest.raises(RuntimeError, match=words):
        SlurmClusterResolver(gpus_per_task=3)
    with pytest.raises(RuntimeError, match=words):
        SlurmClusterResolver(gpus_per_node=1, gpus_per_task=1)


def test_gpus_that_nvidia_smi_lists(srun, nvidia_smi):
    srun(FOUR, SLURM_PROCID=1)
    nvidia_smi(
        "GPU 0: NVIDIA H200 (UUID: GPU-6c8b)\n"
        "  MIG 1g.18gb     Device  0: (UUID: MIG-1a)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-6c8c)"
    )
    assert SlurmClusterResolver().num_accelerators() == {"GPU": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_nvidia_smi_that_fails(srun, nvidia_smi):
    srun(FOUR)
    nvidia_smi("NVIDIA-SMI has failed: no driver", 9)
    words = "^Could not get number of GPUs from nvidia-smi: .*no driver"
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        SlurmClusterResolver()
    assert SlurmClusterResolver(gpus_per_node=0).num_accelerators() == {}


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.data(),
)
def test_every_rank_finds_itself(nodes, data):
    """All ranks see one cluster, each its own address in it, and no GPU twice."""
    total = sum(nodes)
    ps = data.draw(st.integers(0, total), label="ps")
    per_task = data.draw(st.integers(0, 2), label="GPUs per task")
    per_node = max(nodes) * per_task + data.draw(st.integers(0, 3), label="spare")
    seen = set()
    specs, tasks = [], []
    with pytest.MonkeyPatch.context() as patch:
        ranks = [
            (f"n{n + 8}", at) for n, count in enumerate(nodes) for at in range(count)
        ]
        for rank, (host, local) in enumerate(ranks):
            patch.setattr(_gpu_shares, "_taken", None)  # a process of its own
            patch.setenv("SLURM_PROCID", str(rank))
            patch.setenv("SLURM_STEP_NODELIST", f"n[8-{len(nodes) + 7}]")
            patch.setenv("SLURM_STEP_TASKS_PER_NODE", ",".join(map(str, nodes)))
            patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(per_node))))
            resolver = SlurmClusterResolver(
                {"worker": total - ps, "ps": ps}, gpus_per_task=per_task
            )
            specs.append(resolver.cluster_spec())
            tasks.append(resolver.get_task_info())
            assert resolver.master() == f"grpc://{host}:{8888 + local}"
            if per_task:
                gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
                assert len(gpus) == per_task
                taken = {(host, gpu) for gpu in gpus}
                assert not seen & taken
                seen |= taken
    assert all(spec == specs[0] for spec in specs)
    expected = [("ps", at) for at in range(ps)]
    assert tasks == expected + [("worker", at) for at in range(total - ps)]


TWO_ON_ONE_NODE = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}


@pytest.fixture
def task(srun, monkeypatch):
    """Makes this process a task of a node without nvidia-smi."""

    def task(rank, visible, **variables):
        srun(TWO_ON_ONE_NODE, SLURM_PROCID=rank, **variables)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    return task


def found(**options):
    """What a resolver says of this task, and what it leaves it to see."""
    resolver = SlurmClusterResolver(**options)
    return resolver.num_accelerators(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(("rank", "share"), [(0, "0,1"), (1, "2,3")])
@pytest.mark.parametrize("options", [{}, {"gpus_per_task": 2}, {"gpus_per_node": 4}])
@pytest.mark.parametrize("slurm", [{}, {"SLURM_GPUS_ON_NODE": "4"}])
def test_all_resolvers_of_a_process_find_the_same_share(
    task,
    rank,
    share,
    options,
    slurm,
):
    task(rank, "0,1,2,3", **slurm)
    for _ in range(3):
        assert found(**options) == ({"GPU": 2}, share)


def test_a_second_resolver_may_deal_otherwise(task):
    task(1, "4,5,6,7")
    assert found() == ({"GPU": 2}, "6,7")
    assert found(gpus_per_task=1) == ({"GPU": 1}, "5")
    assert found(gpus_per_task=0) == ({}, "5")
    assert found(auto_set_gpu=False) == ({"GPU": 2}, "5")
    assert found() == ({"GPU": 2}, "6,7")


def test_a_share_where_no_variable_was_set_before(task):
    task(1, None)
    for _ in range(2):
        assert found(gpus_per_node=4) == ({"GPU": 2}, "2,3")


def test_what_somebody_else_has_set_since_is_what_there_is(task, monkeypatch):
    task(1, "0,1,2,3")
    assert found() == ({"GPU": 2}, "2,3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert found() == ({"GPU": 1}, "7")


@pytest.mark.parametrize(("rank", "devices"), [(0, "0,1"), (1, "2,3")])
@pytest.mark.parametrize("options", [{}, {"gpus_per_task": 2}])
def test_what_slurm_has_dealt_out_stays_as_it_is(task, rank, devices, options):
    task(rank, devices, SLURM_GPUS_ON_NODE="4")
    for _ in range(2):
        assert found(**options) == ({"GPU": 2}, devices)


def test_one_gpu_for_each_task_by_slurm(task):
    """In a container of devices all of them see their own as number 0."""
    task(1, "0", SLURM_GPUS_ON_NODE="2")
    assert found() == ({"GPU": 1}, "0")
    assert found(gpus_per_task=1) == ({"GPU": 1}, "0")


def test_slurm_knows_how_many_there_are_where_none_are_listed(
    task,
):
    task(1, None, SLURM_GPUS_ON_NODE="4")
    assert found() == ({"GPU": 2}, "2,3")


def test_more_than_slurm_has_given(task):
    task(0, "0,1,2,3", SLURM_GPUS_ON_NODE="4")
    words = r"GPUs.*\b2\b.*\b3\b"
    with pytest.raises(RuntimeError, match=words):
        SlurmClusterResolver(gpus_per_task=3)


def test_a_number_of_slurm_that_cannot_be_read(task):
    task(0, "0,1,2,3", SLURM_GPUS_ON_NODE="gpu:4")
    words = r"SLURM_GPUS_ON_NODE.*\b0\b.*'gpu:4'"
    with pytest.raises(ValueError, match=words):
        SlurmClusterResolver()
    assert found(gpus_per_node=4) == ({"GPU": 2}, "0,1")
