"""Resolvers answer by TensorFlow's rules; a mistake is named by its key."""

import json

import numpy as np
import pytest

from zstrat.cluster import (
    ClusterResolver,
    ClusterSpec,
    FunctionClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TomlClusterResolver,
    UnionResolver,
)

CLUSTER = {
    "ps": ["ps0:2222", "ps1:2222"],
    "worker": ["worker0:2222", "worker1:2222", "worker2:2222"],
}
SPEC = ClusterSpec(CLUSTER)


@pytest.fixture
def tf_config(monkeypatch):
    """Sets TF_CONFIG; a text goes in as it is, None unsets it."""

    def put(value):
        if value is None:
            monkeypatch.delenv("TF_CONFIG", raising=False)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            monkeypatch.setenv("TF_CONFIG", text)

    return put


def test_simple_answers_what_it_was_given():
    resolver = SimpleClusterResolver(
        SPEC, "m:1", "ps", 0, "cloud", {"GPU": 2}, rpc_layer="tcp"
    )
    assert resolver.cluster_spec() is SPEC
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.environment == "cloud"
    assert resolver.num_accelerators() == {"GPU": 2}
    assert resolver.num_accelerators("worker", 9, config_proto=None) == {"GPU": 2}
    assert resolver.master() == "tcp://m:1"
    assert resolver.master("worker", 2) == "tcp://worker2:2222"
    assert resolver.master("worker", 2, rpc_layer="ipc") == "ipc://worker2:2222"
    assert resolver.master("worker") == resolver.master(task_id=1) == "tcp://m:1"
    with pytest.raises(ValueError, match="No task with index 3"):
        resolver.master("worker", 3)


def test_simple_defaults_and_setters():
    resolver = SimpleClusterResolver(SPEC)
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None,) * 3
    assert (resolver.environment, resolver.num_accelerators()) == ("", {})
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "tcp"
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master("ps", 0) == "tcp://ps0:2222"


def test_simple_refuses_other_types():
    with pytest.raises(TypeError, match="`ClusterSpec`"):
        SimpleClusterResolver(CLUSTER)
    with pytest.raises(TypeError, match="master must be a string, got int"):
        SimpleClusterResolver(SPEC, master=1)


@pytest.mark.shows("tf.distribute.cluster_resolver.ClusterResolver")
def test_a_resolver_of_your_own_needs_two_methods():
    class Mine(ClusterResolver):
        def cluster_spec(self):
            return SPEC

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return "me:1"

    mine = Mine()
    assert (mine.task_type, mine.task_id, mine.environment) == (None, None, "")
    assert mine.num_accelerators() == {}
    mine.task_id = 0
    assert mine.task_id == 0
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()


@pytest.mark.parametrize("number", ["x", 0.5, True, -1, [1]])
def test_a_number_of_a_task_that_is_none(number):
    with pytest.raises(ValueError, match=r"task_id.*\b0\b"):
        _ = SimpleClusterResolver(SPEC, task_id=number).task_id


@pytest.mark.parametrize("number", [0, "1", np.int64(1), 1.0])
def test_what_the_program_says_goes_first_and_a_text_may_be_a_number(tf_config, number):
    tf_config({"cluster": CLUSTER, "task": {"type": "ps", "index": 2}})
    union = UnionResolver(SimpleClusterResolver(SPEC, task_id=7))
    for resolver in (TFConfigClusterResolver(), SimpleClusterResolver(SPEC), union):
        resolver.task_type, resolver.task_id = "worker", number
        assert (resolver.task_type, resolver.task_id) == ("worker", int(number))
    union.task_id = None
    assert union.task_id == 7


def test_an_empty_layer_takes_the_scheme_away_where_tensorflow_has_it_so(
    tf_config, file
):
    tf_config({"cluster": CLUSTER, "rpc_layer": "grpc"})
    assert TFConfigClusterResolver().master("ps", 0, "") == "ps0:2222"
    assert TomlClusterResolver(file(FILE), rpc_layer="tcp").master("ps", 0, "") == "c:1"
    simple = SimpleClusterResolver(SPEC, rpc_layer="grpc")
    assert simple.master("ps", 0, "") == "grpc://ps0:2222"
    assert UnionResolver(simple, rpc_layer="x").master("ps", 0, "") == "x://ps0:2222"


@pytest.mark.parametrize(
    "host",
    [
        "a",
        "LOCALHOST",
        "my_host-1",
        "svc-0.ns.local.",
        "10.0.0.1",
        "[::1]",
        "[fe80::1%2]",
    ],
)
def test_hosts_that_are_some(tf_config, host):
    tf_config({"cluster": {"ps": [f"{host}:1"]}})
    assert TFConfigClusterResolver().cluster_spec().task_address("ps", 0) == f"{host}:1"


@pytest.mark.parametrize("value", [None, "", "  ", "{}", {}])
def test_tf_config_unset_or_empty(tf_config, value):
    tf_config(value)
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None,) * 3
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {}


@pytest.mark.shows("tf.distribute.cluster_resolver.TFConfigClusterResolver")
@pytest.mark.shows("TF_CONFIG", "ClusterResolver.cluster_spec")
@pytest.mark.shows("ClusterResolver.task_type", "ClusterResolver.task_id")
def test_tf_config_full(tf_config):
    tf_config(
        {
            "cluster": CLUSTER,
            "task": {"type": "ps", "index": 1},
            "rpc_layer": "grpc",
            "environment": "cloud",
        }
    )
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "cloud")
    assert resolver.master() == "grpc://ps1:2222"
    assert resolver.master("worker", 0) == "grpc://worker0:2222"
    assert resolver.master("ps", 0, "tcp") == "tcp://ps0:2222"
    assert resolver.master(rpc_layer="") == "ps1:2222"


def test_tf_config_is_read_again_at_every_question(
    tf_config,
):
    tf_config(None)
    resolver = TFConfigClusterResolver()
    tf_config({"cluster": CLUSTER, "task": {"type": "worker", "index": "2"}})
    assert resolver.cluster_spec() == SPEC
    assert resolver.task_id == 2
    assert resolver.master() == "worker2:2222"


def test_tf_config_arguments_and_setters_go_first(
    tf_config,
):
    tf_config(
        {
            "cluster": CLUSTER,
            "task": {"type": "worker", "index": 1},
            "rpc_layer": "grpc",
            "environment": "cloud",
        }
    )
    resolver = TFConfigClusterResolver("ps", 0, "tcp", "mine")
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert (resolver.rpc_layer, resolver.environment) == ("tcp", "mine")
    assert resolver.master() == "tcp://ps0:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, ""
    assert resolver.master() == "worker0:2222"
    resolver.task_id = None
    assert resolver.task_id == 1


def test_tf_config_keys_of_others_and_the_address_of_an_evaluator_mean_nothing(
    tf_config,
):
    cluster = {"worker": ["a:1"], "evaluator": ["a:1"]}
    task = {"type": "worker", "index": 0, "trial": "1", "cloud": "x"}
    tf_config({"cluster": cluster, "task": task, "job": {}, "model_dir": "gs://a"})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == cluster
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [("wrker", "did you mean 'worker'"), ("Chief", "did you mean 'chief'"), (5, "'5'")],
)
def test_tf_config_type_of_a_task_that_no_job_has(tf_config, given, words):
    tf_config({"cluster": CLUSTER, "task": {"type": given, "index": 0}})
    with pytest.raises(ValueError, match=rf"^TF_CONFIG: task\.type: .*{words}"):
        _ = TFConfigClusterResolver().task_type
    with pytest.raises(ValueError, match=words):
        TFConfigClusterResolver().master()
    assert TFConfigClusterResolver("worker", 0).master() == "worker0:2222"


def test_tf_config_takes_the_master_of_tensorflow_1(
    tf_config,
):
    cluster = {"master": ["m:1"], "ps": ["p:1"]}
    tf_config({"cluster": cluster, "task": {"type": "master", "index": 0}})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.master()) == ("master", "m:1")
    assert resolver.cluster_spec().as_dict() == cluster


def test_tf_config_session_master_goes_before_all(
    tf_config,
):
    tf_config({"cluster": CLUSTER, "session_master": "s:1", "rpc_layer": "grpc"})
    assert TFConfigClusterResolver().master("worker", 0) == "s:1"


def test_tf_config_single_task_has_no_master(tf_config):
    tf_config({"cluster": {"worker": ["w:1"]}, "rpc_layer": "grpc"})
    assert TFConfigClusterResolver().master() == ""
    tf_config({"cluster": {"worker": {"1": "w:1"}}})
    assert TFConfigClusterResolver().master("worker", 1) == "w:1"


def test_tf_config_sparse_job_and_text_index(tf_config):
    tf_config(
        {
            "cluster": {"worker": {"1": "w1:1"}, "ps": ["[::1]:22"]},
            "task": {"type": "worker", "index": "1"},
        }
    )
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec(
        {"worker": {1: "w1:1"}, "ps": ["[::1]:22"]}
    )
    assert resolver.master() == "w1:1"


def test_tf_config_accepts_schemes(tf_config):
    addresses = ["tcp://w0:1", "ipc:///run/zstrat/w1"]
    tf_config({"cluster": {"worker": addresses}})
    assert TFConfigClusterResolver().cluster_spec().job_tasks("worker") == addresses


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{cluster", r"TF_CONFIG.*JSON.*'\{cluster'"),
        ("[" * 10**5, r"TF_CONFIG.*JSON"),
        ("[1]", r"TF_CONFIG.*'\[1\]'"),
        (
            {"cluster": ["a:1"]},
            r"TF_CONFIG.*'a:1'",
        ),
        ({"cluster": None}, "TF_CONFIG"),
        (
            {"cluster": {"worker": "a:1"}},
            r"TF_CONFIG.*cluster\.worker.*'a:1'",
        ),
        (
            {"cluster": {"worker": ["a:1", 5]}},
            r"TF_CONFIG.*cluster\.worker.*\[1\]",
        ),
        (
            {"cluster": {"ps": ["localhost"]}},
            r"TF_CONFIG.*cluster\.ps.*\[0\]",
        ),
        (
            {"cluster": {"ps": [""]}},
            r"cluster\.ps.*\[0\]",
        ),
        ({"cluster": {"ps": [":80"]}}, "':80'"),
        ({"cluster": {"ps": ["a:b"]}}, r"'a:b'.*\b1\b.*\b65535\b"),
        ({"cluster": {"ps": ["a:70000"]}}, r"\b1\b.*\b65535\b"),
        ({"cluster": {"ps": ["a:0"]}}, r"\b1\b.*\b65535\b"),
        ({"cluster": {"ps": ["a:"]}}, r"\b1\b.*\b65535\b"),
        ({"cluster": {"ps": ["a:\u0662"]}}, r"\b1\b.*\b65535\b"),
        ({"cluster": {"ps": ["::1:22"]}}, "IPv6"),
        ({"cluster": {"ps": ["http://a:1"]}}, r"tcp:// or ipc://"),
        ({"cluster": {"ps": ["[a:1"]}}, r"\[0\].*'\[a'"),
        ({"cluster": {"ps": ["a]:1"]}}, r"\[0\].*'a\]'"),
        ({"cluster": {"ps": [" a:1"]}}, r"\[0\].*\b1\b"),
        (
            {"cluster": {"ps": ["*:1"]}},
            r"\[0\].*'\*:1'.*--bind",
        ),
        (
            {"cluster": {"ps": {"x": "a:1"}}},
            r"cluster\.ps.*'x'",
        ),
        ({"cluster": {"ps": {"-1": "a:1"}}}, r"expected task indices as keys"),
        ({"cluster": {"ps": {"1": "a"}}}, r'cluster\.ps.*\b1\b.*"host:port"'),
        (
            {"cluster": {"ps": {"1": "a:1", "01": "b:1"}}},
            r"cluster\.ps.*'1'.*'01'",
        ),
        (
            {"cluster": {"ps": ["a:1"], "worker": ["a:2", "tcp://a:1"]}},
            r"'tcp://a:1'.*ps:0.*worker:1",
        ),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, r"worker:0.*worker:1"),
        ({"clusters": {"ps": ["a:1"]}}, r"'clusters'.*'cluster'"),
        (
            {"cluster": {"worker": ["a:1"], "pss": ["b:1"]}},
            r"^TF_CONFIG: cluster: unknown job 'pss': .* did you mean 'ps'\?",
        ),
        ({"sparseCluster": {"wrker": {"0": "a:1"}}}, r"did you mean 'worker'\?"),
    ],
)
def test_tf_config_mistakes_in_the_cluster(tf_config, value, words):
    tf_config(value)
    with pytest.raises(ValueError, match=words):
        TFConfigClusterResolver().cluster_spec()
    with pytest.raises(ValueError, match=words):
        TFConfigClusterResolver().master()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"task": 3}, r"TF_CONFIG.*\b3\b"),
        ({"task": {"index": "x"}}, r"TF_CONFIG.*task\.index.*'x'"),
        ({"task": {"index": None}}, r"TF_CONFIG.*task\.index"),
        ({"task": {"index": 1.5}}, r"TF_CONFIG.*task\.index.*\b1\.5\b"),
        ({"task": {"index": True}}, r"TF_CONFIG.*task\.index"),
        ({"task": {"index": "-1"}}, r"TF_CONFIG.*\b0\b.*'-1'"),
        ('{"task": {"index": Infinity}}', r"TF_CONFIG.*task\.index"),
        ({"tasks": {}}, r"TF_CONFIG.*'tasks'.*'task'"),
        ({"task": {"idex": 1}}, r"TF_CONFIG.*'idex'.*'index'"),
    ],
)
def test_tf_config_mistakes_in_the_task(tf_config, value, words):
    tf_config(value)
    with pytest.raises(ValueError, match=words):
        _ = TFConfigClusterResolver().task_id


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({}, r"TF_CONFIG.*task\.type"),
        ({"type": "worker"}, r"TF_CONFIG.*task\.index"),
        ({"type": "worker", "index": 3}, r"\b3\b.*'worker'"),
        ({"type": "chief", "index": 0}, "'chief'"),
    ],
)
def test_tf_config_master_of_a_task_that_is_not_there(tf_config, task, words):
    tf_config({"cluster": CLUSTER, "task": task})
    with pytest.raises(ValueError, match=words):
        TFConfigClusterResolver().master()


def test_tf_config_other_texts_must_be_texts(tf_config):
    tf_config({"rpc_layer": 1, "session_master": 2, "environment": 3})
    resolver = TFConfigClusterResolver()
    with pytest.raises(ValueError, match=r"TF_CONFIG.*rpc_layer"):
        _ = resolver.rpc_layer
    with pytest.raises(ValueError, match=r"TF_CONFIG.*session_master.*\b2\b"):
        resolver.master()
    with pytest.raises(ValueError, match=r"TF_CONFIG.*\b3\b"):
        _ = resolver.environment


FILE = """
[cluster]
worker = ["a:1", "b:1"]
ps = ["c:1"]
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return write


def test_toml_with_and_without_a_task(file):
    resolver = TomlClusterResolver(file(FILE))
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["a:1", "b:1"],
        "ps": ["c:1"],
    }
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert resolver.master("ps", 0, "tcp") == "tcp://c:1"
    resolver = TomlClusterResolver(file(FILE + '[task]\ntype = "worker"\nindex = 1\n'))
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "b:1"


def test_toml_arguments_go_before_the_file(file):
    path = str(file(FILE + '[task]\ntype = "ps"\nindex = 1\n'))
    resolver = TomlClusterResolver(path, "worker", 0, rpc_layer="tcp")
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "tcp://a:1"


def test_toml_sparse_job(file):
    resolver = TomlClusterResolver(file('[cluster.worker]\n3 = "d:1"\n'))
    assert resolver.cluster_spec() == ClusterSpec({"worker": {3: "d:1"}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cluster", r"cluster\.toml.*TOML.*'\]'"),
        ("", r"cluster\.toml.*\[cluster\]"),
        ("[clusters]", r"cluster\.toml.*'clusters'"),
        ("cluster = 3", r"cluster\.toml.*\b3\b"),
        (
            "[cluster]\nworkers = ['a:1']",
            "'workers'",
        ),
        ("[cluster]\npss = ['a:1']", r"unknown job 'pss': .* mean 'ps'\?"),
        ("[cluster]\nps = 'a:1'", r"cluster\.ps"),
        (
            "[cluster]\nps = ['a:1']\nworker = ['a:1']",
            r"cluster\.toml.*'a:1'.*ps:0",
        ),
        ("[cluster]\nps = ['a']", r"cluster\.ps.*\[0\].*'a'"),
        ("[cluster]\n[task]\nid = 1", "'id'"),
        ("task = 3\n[cluster]", r"\[task\].*\b3\b"),
        (
            "[cluster]\n[task]\ntype = 'x'",
            r"task\.type.*'x'",
        ),
        (
            "[cluster]\n[task]\nindex = '1'",
            r"task\.index.*'1'",
        ),
        ("[cluster]\n[task]\nindex = true", r"task\.index"),
        ("[cluster]\n[task]\nindex = -1", r"task\.index.*\b0\b.*\b1\b"),
    ],
)
def test_toml_mistakes(file, text, words):
    with pytest.raises(ValueError, match=words):
        TomlClusterResolver(file(text))


def test_toml_file_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml"):
        TomlClusterResolver(tmp_path / "nowhere.toml")


def simple(cluster, **options):
    return SimpleClusterResolver(ClusterSpec(cluster), **options)


def test_union_of_lists_is_their_concatenation():
    union = UnionResolver(
        simple({"worker": ["a:1", "b:1"], "ps": ["p:1"]}), simple({"worker": ["c:1"]})
    )
    assert union.cluster_spec().as_dict() == {
        "worker": ["a:1", "b:1", "c:1"],
        "ps": ["p:1"],
    }


@pytest.mark.parametrize("turned", [False, True])
def test_union_with_a_sparse_part_is_merged_by_index(turned):
    parts = [simple({"worker": ["a:1", "b:1"]}), simple({"worker": {3: "d:1"}})]
    union = UnionResolver(*(reversed(parts) if turned else parts))
    assert union.cluster_spec() == ClusterSpec(
        {"worker": {0: "a:1", 1: "b:1", 3: "d:1"}}
    )


def union_of(*tasks):
    return (
        UnionResolver(
            *(SimpleClusterResolver(ClusterSpec({"worker": each})) for each in tasks)
        )
        .cluster_spec()
        .as_dict()
    )


@pytest.mark.parametrize("nothing", [[], {}])
def test_a_part_without_tasks_adds_nothing_to_a_union(nothing):
    parts = [["a:1"], ["b:1"]]
    for place in range(3):
        with_it = [*parts[:place], nothing, *parts[place:]]
        assert union_of(*with_it) == {"worker": ["a:1", "b:1"]}
    sparse = {"worker": {0: "a:1", 3: "d:1"}}
    assert union_of(["a:1"], nothing, {3: "d:1"}) == sparse
    assert union_of(nothing) == union_of(nothing, []) == {"worker": {}}


def test_union_with_an_index_twice():
    union = UnionResolver(
        simple({"worker": ["a:1"]}), simple({"worker": {0: "b:1", 2: "c:1"}})
    )
    with pytest.raises(KeyError, match=r"\[0\].*'worker'"):
        union.cluster_spec()


def test_union_asks_the_first_one():
    first = simple(
        {"worker": ["a:1"]},
        master="m:1",
        task_type="worker",
        task_id=4,
        environment="cloud",
        num_accelerators={"GPU": 1},
        rpc_layer="tcp",
    )
    union = UnionResolver(first, simple({"ps": ["p:1"]}, master="n:1", task_type="ps"))
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 4, "tcp")
    assert (union.environment, union.num_accelerators()) == ("cloud", {"GPU": 1})
    assert union.master() == "tcp://m:1"
    assert union.master("ps", 0) == "p:1"
    assert union.master("ps", 0, "ipc") == "ipc://p:1"
    union.task_type, union.task_id, union.rpc_layer = "ps", 0, "ipc"
    assert (union.task_type, union.task_id) == ("ps", 0)
    assert union.master("ps", 0) == "ipc://p:1"
    overridden = UnionResolver(first, task_type="ps", task_id=0, rpc_layer="x")
    assert (overridden.task_type, overridden.task_id) == ("ps", 0)
    assert overridden.rpc_layer == "x"


def test_union_refuses_what_it_cannot_unite():
    with pytest.raises(ValueError, match="ClusterResolver"):
        UnionResolver()
    with pytest.raises(ValueError, match="'port'"):
        UnionResolver(simple({}), port=3)
    with pytest.raises(TypeError, match="`ClusterResolver`"):
        UnionResolver({})


def test_a_function_is_asked_again_and_again():
    specs = [ClusterSpec({"worker": [f"host{n}:1"]}) for n in range(3)]
    resolver = FunctionClusterResolver(iter(specs).__next__)
    assert resolver.may_change
    assert resolver.cluster_spec() == specs[0]
    assert resolver.master("worker", 0) == "host1:1"
    assert resolver.cluster_spec() == specs[2]
