"""The table of names: what it is made of, and that it is not made while a name has no
place or no test, or TensorFlow has one that nothing is said of."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def make_api(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "make_api", raising=False)
    import make_api

    yield make_api
    monkeypatch.delitem(sys.modules, "make_api")


NAMES = """
[[page]]
title = "The page"
about = "What differs."
[page.names]
"tf.sum" = "zs.ReduceOp.SUM"
"tf.Tensor" = "jax: jax.Array"
"""

TESTS = """
import pytest


@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.shows("tf.sum")
def test_sums(x):
    assert x + x == 2 * x
"""


@pytest.fixture
def tree(tmp_path):
    """A function that makes a small project: names, and tests by their files."""

    def made(names=NAMES, **tests):
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs" / "names.toml").write_text(names)
        (tmp_path / "tests" / "room").mkdir(parents=True)
        for name, text in tests.items():
            (tmp_path / "tests" / "room" / f"{name}.py").write_text(dedent(text))
        return tmp_path

    return made


def test_a_row_has_a_name_a_place_and_a_test(make_api, tree):
    text = make_api.table(tree(test_sums=TESTS))
    assert text.startswith("# Where tf.distribute's names live\n")
    assert text.count("## The page\n\nWhat differs.\n") == 1
    row = "| tf.sum | `zs.ReduceOp.SUM` | [`test_sums`](../tests/room/test_sums.py) |"
    assert row in text.split("\n")
    assert "| tf.Tensor | jax.Array |" in text.split("\n")


def test_a_place_is_linked_to_the_file_that_defines_it(make_api):
    for here, file in (
        ("zs.ReduceOp.SUM", "zstrat/collectives/_reduction.py"),
        ("zs.Variable", "zstrat/variables/_variable.py"),
        ("zs.InputContext.num_replicas_in_sync", "zstrat/data/_replica_rows.py"),
        ("zs.data.Dataset.range", "zstrat/data/_sources.py"),
        ("zs.compat.v1.distribute", "zstrat/compat/v1/distribute/__init__.py"),
    ):
        assert make_api._file(here, DOCS.parent) == file


def test_the_first_test_in_order_of_files_counts(make_api, tree):
    """Those of files that run in processes of their own, too."""
    root = tree(zz_alone=TESTS, test_sums=TESTS.replace("tf.sum", "tf.mean"))
    assert make_api.shows(root) == {
        "tf.mean": "tests/room/test_sums.py::test_sums",
        "tf.sum": "tests/room/zz_alone.py::test_sums",
    }


@pytest.mark.parametrize(
    ("names", "tests", "words"),
    [
        (NAMES, "", r"'tf.sum' \(zs.ReduceOp.SUM\) is shown by no test: mark one with"),
        (
            NAMES.replace("ReduceOp.SUM", "ReduceOp.MEDIAN"),
            TESTS,
            r"ReduceOp.*MEDIAN",
        ),
        (
            NAMES.replace("zs.ReduceOp", "zs.nothing"),
            TESTS,
            "SUM",
        ),
        (
            NAMES,
            TESTS.replace('shows("tf.sum"', 'shows("tf.sum", "tf.som"'),
            r"'tf.som' is shown by tests/room/test_sums.py::test_sums and is not in",
        ),
    ],
    ids=["no test", "no such attribute", "no such module", "unknown mark"],
)
def test_what_is_missing_is_named(make_api, tree, names, tests, words):
    with pytest.raises(make_api.Missing, match=words):
        make_api.table(tree(names, test_sums=tests))


def test_everything_that_is_missing_is_named_at_once(make_api, tree):
    names = NAMES + '"tf.mean" = "zs.ReduceOp.MEAN"\n"tf.max" = "zs.ReduceOp.MAX"\n'
    with pytest.raises(make_api.Missing) as raised:
        make_api.table(tree(names, test_sums=TESTS.replace("tf.sum", "tf.other")))
    lines = str(raised.value).split("\n")
    assert [line.split("'")[1] for line in lines] == [
        "tf.other",
        "tf.sum",
        "tf.mean",
        "tf.max",
    ]


@pytest.fixture
def run(make_api, tree, monkeypatch):
    """Calls the script on a small tree."""
    root = tree(test_sums=TESTS)
    monkeypatch.setattr(make_api, "ROOT", root)
    monkeypatch.setattr(make_api, "TABLE", root / "docs" / "api.md")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["make_api.py", *arguments])
        return make_api.main()

    return run


def test_a_table_that_is_not_up_to_date_is_told(make_api, run, capsys):
    assert run("--check") == 1
    assert "run `make api`" in capsys.readouterr().err
    assert run() == 0
    assert run("--check") == 0
    make_api.TABLE.write_text(make_api.TABLE.read_text() + "by hand\n")
    assert run("--check") == 1


def test_no_table_is_written_while_something_is_missing(make_api, run, capsys):
    (make_api.ROOT / "tests" / "room" / "test_sums.py").write_text("")
    assert run() == 1
    assert "'tf.sum' (zs.ReduceOp.SUM) is shown by no test" in capsys.readouterr().err
    assert not make_api.TABLE.exists()


@pytest.fixture
def tf_names(make_api):
    import tf_names

    return tf_names


def test_each_public_name_of_tensorflow_is_here_or_has_words(tf_names):
    inventory, names = (
        tomllib.loads((DOCS / name).read_text())
        for name in ("tf_names.toml", "names.toml")
    )
    assert len(inventory) > 80
    assert not tf_names.wrong(inventory, names)


INVENTORY = """
["tf.distribute.InputContext"]
arguments = ["num_input_pipelines"]
"get_per_replica_batch_size" = ["global_batch_size"]
"num_input_pipelines" = "value"
["tf.compat.v1.distribute.InputContext"]
same_as = "tf.distribute.InputContext"
["tf.distribute.cluster_resolver.SimpleClusterResolver"]
above = ["tf.distribute.cluster_resolver.ClusterResolver"]
["tf.VariableAggregation"]
"SUM" = "value"
"""
HELD = "tf.distribute.InputContext"


@pytest.mark.parametrize(
    ("more", "words", "problems"),
    [
        ("", "", []),
        (
            '["tf.Tape"]\n"stop" = ["when"]',
            "",
            ["tf.Tape : zs.Tape is not", r"tf.Tape stop\(when=\): ", "tf.Tape stop: "],
        ),
        ('["tf.Tape"]\n"stop" = ["when"]', '[[instead]]\nof = ["tf.Tape"]', []),
        ('["tf.Tape"]', '[here]\n"tf.Tape" = "zs.grad"', []),
        (
            '["tf.Tape"]\narguments = ["variables", "persistent"]',
            '[here]\n"tf.Tape" = "zs.grad"',
            [r"tf.Tape \(persistent=\): zs.grad takes no persistent"],
        ),
        (
            '["tf.Variable"]\n"eval" = ["session"]',
            '[[instead]]\nof = ["tf.Variable", "Other"]\nnames = ["eval"]',
            [],
        ),
        (
            "",
            f'[[instead]]\nof = ["{HELD}"]\nnames = ["eval"]',
            [f"eval of {HELD}: .* TensorFlow does not have it"],
        ),
        (
            "",
            f'[[instead]]\nof = ["{HELD}"]\nnames = ["num_input_pipelines"]',
            [f"{HELD} num_input_pipelines: .* it is there, as zs.InputContext"],
        ),
        ("", '[[instead]]\nof = ["tf.Gone"]', ["all of tf.Gone: .* does not have it"]),
    ],
    ids=[
        "all here",
        "unknown",
        "all of it",
        "elsewhere",
        "argument",
        "one of several",
        "not TensorFlow's",
        "here",
        "gone",
    ],
)
def test_a_word_is_neither_missing_nor_wrong(tf_names, more, words, problems):
    found = tf_names.wrong(tomllib.loads(INVENTORY + more), tomllib.loads(words))
    assert len(found) == len(problems), found
    for line, expected in zip(found, problems, strict=True):
        assert re.search(expected, line)


def test_what_to_write_instead_is_in_the_table(make_api, tree):
    words = """
[here]
"tf.Tape" = "zs.grad"
[[instead]]
of = ["tf.Tape", "tf.OtherTape"]
names = ["stop", "(watch=)"]
write = "`zs.grad`"
[[instead]]
of = ["tf.Gone"]
write = "nothing"
"""
    root = tree(NAMES + words, test_sums=TESTS)
    inventory = root / "docs" / "tf_names.toml"
    inventory.write_text('["tf.Tape"]\narguments = ["watch"]\n"stop" = []\n["tf.Gone"]')
    lines = make_api.table(root).split("\n")
    assert "| `tf.Tape`, `tf.OtherTape`: `stop`, `(watch=)` | `zs.grad` |" in lines
    assert "| `tf.Gone` | nothing |" in lines
    inventory.write_text('["tf.Tape"]\narguments = ["watch"]\n"stop" = []')
    with pytest.raises(make_api.Missing, match=r"tf.Gone: .*does not have it"):
        make_api.table(root)
