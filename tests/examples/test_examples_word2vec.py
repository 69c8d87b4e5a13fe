"""The example of sharded tables: its text, its batches, and a whole run of it, in which
Ctrl-C, a second run and the death of a worker lose nothing."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tokenize
from pathlib import Path

import numpy as np
import psutil
import pytest
from programs import Program

pytestmark = pytest.mark.usefixtures("programs")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name):
    """A module of the examples, which are scripts and in no package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source_tokens():
    yield example("source_tokens")
    del sys.modules["source_tokens"]


@pytest.fixture(scope="module")
def word2vec(source_tokens):
    yield example("word2vec")
    del sys.modules["word2vec"]


def test_strings_comments_and_numbers_are_no_words(source_tokens):
    source = '''
def f(self, größe=0x1F, x1=1e5):  # a comment with 'a quote
    """A docstring with "quotes" and # no comment."""
    return rb"\\"bytes" + 'it\\'s' + r"raw" f"{hidden}" % self.größe
'''
    expected = "def f self größe x1 return self größe"
    assert source_tokens.split(source) == expected.split()


@pytest.mark.parametrize("module", ["bisect", "heapq", "queue", "sched", "shelve"])
def test_names_are_those_that_the_tokenizer_finds(source_tokens, module):
    source = (Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py").read_text("utf-8")
    assert not re.search(r"\bf['\"]", source), "the tokenizer looks into f-strings"
    expected = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME
    ]
    assert source_tokens.split(source) == expected


def test_the_library_is_without_what_was_installed_beside_it(source_tokens):
    files = source_tokens.source_files()
    assert len(files) > 500
    assert not any("site-packages" in path.parts for path in files)
    some = source_tokens.source_files(("json", "queue"))
    names = {path.name for path in some}
    assert {"queue.py", "decoder.py", "encoder.py"} <= names
    assert len(some) < 20


def test_rare_words_are_left_out_of_the_text(source_tokens, tmp_path):
    source = tmp_path / "a.py"
    source.write_text("a b a c b a d")
    corpus = source_tokens.count([source], 2)
    assert corpus.words == ["a", "b"]
    assert corpus.counts.tolist() == [3, 2]
    assert corpus.tokens.tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(KeyError, match=r"'c'.*\b2\b"):
        corpus.number("c")


def test_a_corpus_is_made_once_and_a_broken_cache_is_made_anew(source_tokens, tmp_path):
    first = source_tokens.load(tmp_path, 2, ("queue",))
    (path,) = tmp_path.iterdir()
    whole, made = path.read_bytes(), path.stat().st_mtime_ns
    again = source_tokens.load(tmp_path, 2, ("queue",))
    assert path.stat().st_mtime_ns == made
    assert again.words == first.words
    np.testing.assert_array_equal(again.tokens, first.tokens)
    for broken in (b"", b"garbage", whole[: len(whole) // 2]):
        path.write_bytes(broken)
        mended = source_tokens.load(tmp_path, 2, ("queue",))
        np.testing.assert_array_equal(mended.tokens, first.tokens)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert source_tokens.load(tmp_path, 3, ("queue",)).digest != first.digest


def test_sampling_follows_the_formulas_of_word2vec(word2vec, source_tokens):
    counts = np.array([160, 10])
    tokens = np.repeat([0, 1], counts)
    corpus = source_tokens.Corpus(["a", "b"], counts, tokens, "")
    threshold = counts[0] / len(tokens) / 4
    keep, noise = word2vec.sampling(corpus, threshold)
    # sqrt(1/4) + 1/4; the other word is rarer than the threshold.
    np.testing.assert_allclose(keep, [0.75, 1.0])
    # 16 to the power 3/4 is 8.
    np.testing.assert_allclose(noise, [8 / 9, 1.0])


@pytest.fixture
def options():
    return argparse.Namespace(batch=32, window=3, negatives=16)


def test_a_batch_holds_words_and_what_stands_near_them(word2vec, options):
    n = 101
    tokens = np.arange(n, dtype=np.int32)  # each word's number is its place
    noise = np.arange(1, n + 1) / n
    made = word2vec.batches(tokens, np.ones(n), noise, options, (0, 0, 1))
    one_pass = list(itertools.islice(made, n // options.batch))
    offsets = [-3, -2, -1, 1, 2, 3]
    reaches = set()
    for batch in one_pass:
        assert batch["context"].dtype == batch["negative"].dtype == np.int32
        assert batch["negative"].shape == (16,)
        for center, context, mask in zip(
            batch["center"], batch["context"], batch["mask"], strict=True
        ):
            places = center + np.array(offsets)
            inside = (places >= 0) & (places < n)
            reach = max(abs(o) for o, m in zip(offsets, mask, strict=True) if m)
            reaches.add(reach)
            expected = inside & (np.abs(offsets) <= reach)
            assert mask.tolist() == expected.tolist()
            np.testing.assert_array_equal(context[expected], places[expected])
            assert ((context >= 0) & (context < n)).all()
    assert reaches == {1, 2, 3}
    centers = np.concatenate([batch["center"] for batch in one_pass])
    assert len(set(centers.tolist())) == len(centers), "a word twice in one pass"


def test_what_is_resumed_does_not_draw_again_what_was_drawn(word2vec, options):
    tokens = np.arange(100, dtype=np.int32)
    noise = np.arange(1, 101) / 100

    def first(seed):
        made = word2vec.batches(tokens, np.ones(100), noise, options, seed)
        return next(made)["center"].tolist()

    assert first((0, 0, 1)) == first((0, 0, 1))
    assert first((0, 0, 1)) != first((0, 500, 1)) != first((0, 0, 0))


def test_the_loss_is_that_of_negative_sampling(word2vec):
    random = np.random.default_rng(0)
    words, contexts = random.normal(size=(2, 9, 4)).astype(np.float32)
    batch = {
        "center": np.array([1, 5]),
        "context": np.array([[2, 3], [1, 8]]),
        "mask": np.array([[1.0, 1.0], [0.0, 1.0]], np.float32),
        "negative": np.array([4, 4, 7]),
    }
    loss, mean = word2vec.loss_fn(words, contexts, batch, 5 / 3)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    expected = 0.0
    for center, context in ((1, 2), (1, 3), (5, 8)):  # the pairs that count
        expected -= np.log(sigmoid(words[center] @ contexts[context]))
        for negative in (4, 4, 7):
            score = words[center] @ contexts[negative]
            expected -= 5 / 3 * np.log(sigmoid(-score))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(mean, expected / 3, rtol=1e-5)


def test_neighbours_are_the_nearest_of_the_common_words(word2vec, source_tokens):
    angles = np.radians([0, 80, 20, 10, 5, 30])
    vectors = np.stack([np.cos(angles), np.sin(angles)], 1)
    counts = np.array([9, 8, 7, 6, 5, 4])
    words = ["int", "b", "float", "d", "rare", "rarer"]
    corpus = source_tokens.Corpus(words, counts, np.repeat(range(6), counts), "")
    found = word2vec.nearest(vectors, corpus, "int", 2, common=6)
    assert [word for word, _ in found] == ["d", "float"]
    np.testing.assert_allclose([cosine for _, cosine in found], np.cos(angles[[3, 2]]))
    # Of a rare word, too, and it is not its own neighbour.
    assert word2vec.nearest(vectors, corpus, "rare", 1, common=6)[0][0] in ("d", "int")

    cosines = [
        a @ b for a, b in itertools.combinations(vectors[counts >= 6], 2)
    ]  # of the known pairs only one is in this text
    expected = np.cos(angles[2]) - np.mean(cosines)
    np.testing.assert_allclose(word2vec.margin(vectors, corpus, 6), expected)


@contextlib.contextmanager
def running(*arguments, cwd):
    """A program of its own, far from the checkout; killed if the test fails."""
    env = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "ZSTRAT_KEYS")}
    process = Program(
        [str(EXAMPLES / "word2vec.py"), *arguments],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def lines_until(process, pattern):
    """What it prints up to the first line that fits."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.match(pattern, line):
            return "".join(seen)
    raise AssertionError(f"no {pattern!r} in: {''.join(seen)}\n{process.stderr.read()}")


def kill_a_worker(pid):
    (victim, *_) = [
        child
        for child in psutil.Process(pid).children(recursive=True)
        if "worker" in " ".join(child.cmdline())
    ]
    victim.kill()


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_run_that_was_stopped_goes_on_and_does_not_mind_a_dead_worker(tmp_path):
    smoke = ["--smoke", "--epochs=2", "--every=20", "--cache=made", "--out=checkpoints"]
    with running(*smoke, "--ps", "1", "--workers", "1", cwd=tmp_path) as first:
        lines_until(first, "step 20/")
        first.send_signal(signal.SIGINT)
        out, err = first.communicate(timeout=240)
    assert first.returncode == 130, err
    assert not err.strip(), err
    (stopped,) = re.findall(r"^stopped at step (\d+): .*; run again", out, re.MULTILINE)

    with running(*smoke, cwd=tmp_path) as second:
        out = lines_until(second, "going on from step")
        assert re.findall(r"from step (\d+)$", out, re.MULTILINE) == [stopped]
        out += lines_until(second, "step ")
        kill_a_worker(second.pid)
        rest, err = second.communicate(timeout=240)
    out += rest
    assert second.returncode == 0, out + err
    assert "Traceback" not in out + err
    # Its loss is worth a line, what becomes of its closures another, and where its log
    # is kept a third.
    lost = re.compile(
        r"/job:worker/task:\d|worker:\d was killed by SIGKILL; its log is"
    )
    assert all(lost.search(line) for line in err.splitlines()), err
    assert len(err.splitlines()) <= 3, err
    (near,) = re.findall(r"^ +Lock: (.*)$", out, re.MULTILINE)
    assert {"RLock", "Condition", "Semaphore"} & set(near.split())
    (total,) = set(re.findall(r"^step \d+/(\d+) ", out, re.MULTILINE))
    (steps,) = re.findall(r"^(\d+) steps in ", out, re.MULTILINE)
    assert int(stopped) + int(steps) == int(total), "a step was lost or done twice"
