"""The site of `make docs`, without building it: every page is in its navigation, every
public name in its reference, and every link leads somewhere."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml

import zstrat as zs

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


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
    made = {*site_pages.FROM_ROOT.values(), "examples.md", "reference.md"}
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(named) == sorted(made | written)


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


def test_every_public_name_is_in_the_reference_once(site_pages):
    names = [name for page in site_pages._reference() for name in page["names"]]
    assert sorted(set(names)) == sorted(names)
    public = {name for name in zs.__all__ if not inspect.ismodule(getattr(zs, name))}
    assert public <= set(names)
    for name in names:
        found = functools.reduce(getattr, name.split("."), zs)
        package, _, last = site_pages.place(name).rpartition(".")
        assert getattr(sys.modules[package], last) is found


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
            "[`zs.data.Dataset.batch`][zstrat.data.Dataset]",
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
