"""The site of `make docs`, without building it: every page is in its navigation, every
public name in its reference, and every link leads somewhere."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import zstrat as zs

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"\bzs\.((?:\w+\.)+\w+)")
LINK = re.compile(r"\]\(([^()\s]+)\)")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.fixture
def site_pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.delitem(sys.modules, "site_pages", raising=False)
    import site_pages

    yield site_pages
    monkeypatch.delitem(sys.modules, "site_pages")


def test_every_page_is_in_the_navigation_and_the_other_way_round(site_pages):
    def files(entries):
        for entry in entries:
            ((_, inside),) = entry.items()
            yield from [inside] if isinstance(inside, str) else files(inside)

    named = list(files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    docs = ROOT / "docs"
    made = {*site_pages.FROM_ROOT.values(), "examples.md", "reference.md"}
    written = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert sorted(named) == sorted(made | written)


def test_the_site_follows_the_scheme_that_the_browser_prefers():
    """Material keeps the first scheme that it chose, unless one is named for that."""
    theme = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]
    first, *schemes = [each["media"] for each in theme["palette"]]
    assert first == "(prefers-color-scheme)"
    wanted = {f"(prefers-color-scheme: {scheme})" for scheme in ("light", "dark")}
    assert {*schemes} == wanted


def headings(page):
    """What a link to a part of a page says, as GitHub and the site make it."""
    found = re.findall(
        r"^#+ (.*)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in LINK.findall(text):
        if ":" in target:
            continue
        file, _, part = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        if part:
            assert part in headings(there), f"{page.name}: no such heading: {target}"


def test_the_reference_shows_how_a_group_is_really_called():
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "site_signatures.py"))
    package = griffe.load(
        "zstrat.collectives", search_paths=[str(ROOT)], extensions=extensions
    )
    group = package["group._group.Group"]
    for name in ("__init__", "create", "all_reduce", "all_gather_async", "reform"):
        shown = [each.name for each in group.all_members[name].parameters]
        found = inspect.getattr_static(zs.collectives.Group, name)
        python = inspect.signature(getattr(found, "__func__", found))
        assert shown == list(python.parameters), name
        assert "args" not in shown


def test_every_public_name_is_in_the_reference_once(site_pages):
    names = [name for page in site_pages._reference() for name in page["names"]]
    assert sorted(set(names)) == sorted(names)
    public = {name for name in zs.__all__ if not inspect.ismodule(getattr(zs, name))}
    missing = public - set(names)
    assert not missing, f"{missing}: add it to docs/reference.toml, under names"
    for name in names:
        found = functools.reduce(getattr, name.split("."), zs)
        package, _, last = site_pages.place(name).rpartition(".")
        assert getattr(sys.modules[package], last) is found


DOORS = (
    *("cluster", "cluster_resolver", "collectives", "coordinator", "data", "launch"),
    *("integrations", "keras", "optimizers"),
)
"""Packages with names that only other packages need, or that need other libraries:
programs use those on pages."""


REMEDY = "add it to docs/reference.toml, under names or internal_names"


def names_of_modules():
    """Path -> function or class, for all that public modules define."""
    modules = {each: getattr(zs, each) for each in zs.__all__ if each not in DOORS}
    modules = {path: each for path, each in modules.items() if inspect.ismodule(each)}
    found = {}
    while modules:
        path, module = modules.popitem()
        for name in dir(module):
            value = getattr(module, name)
            home = getattr(value, "__module__", None) or getattr(value, "__name__", "")
            if name.startswith("_") or not home.startswith(module.__name__):
                continue
            if inspect.ismodule(value):
                modules[f"{path}.{name}"] = value
            elif callable(value):
                found[f"{path}.{name}"] = value
    return found


def names_on_pages():
    """Path -> function or class, for all that pages and examples use."""
    found = {}
    for page in (*PAGES, *(ROOT / "examples").glob("*.py")):
        for path in NAME.findall(page.read_text()):
            value, parts = zs, path.split(".")
            while parts and inspect.ismodule(value):
                value = getattr(value, parts.pop(0))
            if callable(value):
                found[path] = value
    return found


def test_names_of_public_modules_are_in_the_reference(site_pages):
    names = [name for page in site_pages._reference() for name in page["names"]]
    internal = site_pages._tables()["internal_names"]
    known = [functools.reduce(getattr, n.split("."), zs) for n in (*names, *internal)]
    defined = names_of_modules()
    assert "partitioners.MinSizePartitioner" in defined
    assert {*internal} <= {*defined}, "no longer there"
    used = names_on_pages()
    assert "cluster_resolver.TPUClusterResolver" in used
    assert not {*internal} & {*used}
    wanted = {**defined, **used}
    missing = [path for path in sorted(wanted) if wanted[path] not in known]
    assert not missing, f"{missing}: {REMEDY}"


@pytest.fixture
def of_tf(site_pages, monkeypatch):
    """Class of the reference -> those of its members that tf.distribute has."""
    monkeypatch.delitem(sys.modules, "tf_names", raising=False)
    import tf_names

    names = tomllib.loads((ROOT / "docs" / "names.toml").read_text())
    paths = {here for page in names["page"] for here in page["names"].values()}
    inventory = tomllib.loads((ROOT / "docs" / "tf_names.toml").read_text())
    for fact in tf_names._facts(inventory):
        if fact.name and "(" not in fact.name and not tf_names._missing(fact, names):
            paths.add(f"{tf_names._place(fact.owner, names)}.{fact.name}")
    by_class = {}
    for path in paths:
        owner, _, member = path.rpartition(".")
        if isinstance(kind := tf_names.found_at(owner), type):
            by_class.setdefault(kind, set()).add(member)
    return {
        name: {each for base in kind.__mro__ for each in by_class.get(base, ())}
        for name, kind in site_pages.classes().items()
    }


def test_classes_are_shown_with_all_members_that_tensorflow_has(site_pages, of_tf):
    shown = {
        name: {*site_pages.members(name), *site_pages.inherited(name)} for name in of_tf
    }
    lacking = {name: members - shown[name] for name, members in of_tf.items()}
    assert {name: each for name, each in lacking.items() if each} == {}
    assert {"assign", "scatter_add", "numpy"} <= {*of_tf["Variable"]} & shown[
        "Variable"
    ]
    assert {"run", "scope", "gather"} <= of_tf["MirroredStrategy"]


def test_what_is_internal_is_there_and_nothing_of_tensorflow(site_pages, of_tf):
    for name, members in site_pages._internal().items():
        kind = site_pages.classes()[name]
        assert {*members} <= {*site_pages._public(kind), "__init__"}, name
        assert not {*members} & of_tf[name], name
        for other, below in site_pages.classes().items():
            if issubclass(below, kind):
                assert not {*members} & {*site_pages.members(other)}, other


def test_a_variable_is_shown_with_what_programs_call(site_pages):
    shown = site_pages.members("Variable")
    assert {"assign", "assign_add", "numpy", "value", "scatter_add"} <= {*shown}
    assert not {"spec", "storage", "owner"} & {*shown}
    made = site_pages.reference()["reference/variables.md"]
    (of_variable,) = re.findall(r"::: \S+\.Variable\n(?: .*\n)*", made)
    assert '"scatter_max"' in of_variable


def test_what_the_reference_shows_with_a_base_is_linked(site_pages):
    assert site_pages.members("MirroredStrategy") == [
        "num_replicas_in_sync",
        "extended",
    ]
    assert site_pages.inherited("MirroredStrategy")["run"] == "Strategy"
    page = site_pages.reference()["reference/strategies.md"]
    base = "zstrat.strategy.Strategy"
    assert f"`MirroredStrategy` inherits from [`zs.Strategy`][{base}]: " in page
    assert f"[`run`][{base}.run]" in page


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("index.md", "[a](docs/data.md#files)", "[a](data.md#files)"),
        ("data.md", "[a](../README.md)", "[a](index.md)"),
        ("data.md", "[a](machines.md)", "[a](machines.md)"),
        ("data.md", "[`d`](../examples/digits.py)", "[`d`](examples/digits_py.md)"),
        ("api.md", "[`test`](../tests/test_site.py)", "`test`"),
        ("api.md", "[`zs.grad`](../zstrat/x.py)", "[`zs.grad`][zstrat.program.grad]"),
        (
            "api.md",
            "[`zs.data.Dataset.batch`](../zstrat/data/_dataset.py)",
            "[`zs.data.Dataset.batch`][zstrat.data.Dataset.batch]",
        ),
        (
            "api.md",
            "[`zs.TPUStrategy.run`](../zstrat/strategy/_strategy.py)",
            "[`zs.TPUStrategy.run`][zstrat.strategy.Strategy.run]",
        ),
        ("data.md", "[a](#files), ['a']['b'] `x['a']`", "[a](#files), \\['a']\\['b'] "),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(
    site_pages, page, link, expected
):
    assert site_pages.relinked(link, page).startswith(expected)


def test_code_is_left_as_it_is_but_for_what_stands_behind_its_language(site_pages):
    page = "[a](../x.py)\n```python servers\n[b](../x.py)\n```\n"
    changed = site_pages.outside_fences(
        page, lambda text: site_pages.relinked(text, "data.md")
    )
    assert changed == "a\n```python\n[b](../x.py)\n```\n"
