"""What `make docs` adds to the pages of docs/: those of the root, of the examples, and
of the reference, and links that hold in the site as they do in the repository.

A page is written once, for readers of the repository. Law of the hook: a link to a file
that is a page of the site leads to that page, one to a public name of `zs` leads to its
docstring, and what the site does not have (sources, tests) keeps its text alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import operator
import os
import posixpath
import re
import textwrap
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import zstrat
from zstrat.doors import homes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported, for zs.keras

ROOT: Final = Path(__file__).resolve().parents[1]
FROM_ROOT: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that lie in the root of the repository, and what they are in the site."""

_LINK: Final = re.compile(r"(?<!!)\[((?:[^\[\]]|\[\])+)\]\(([^()\s]+)\)")
_NAME: Final = re.compile(r"`zs\.([\w.]+)`")
_LOADED: Final = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\"(https?://[^\"]*)\"")
_KEYS: Final = re.compile(r"`[^`]*`|(\[)(?=')")
"""Of a path like ``['embed']['table']``, which would be a reference, and code."""


def on_config(config: Any) -> Any:
    """Puts the pages that are made under the entry of the page that lists them."""
    for entry in config.nav:
        ((title, page),) = entry.items()
        if page in ("examples.md", "reference.md"):
            made = {**examples(), **reference()}
            folder = page.removesuffix(".md") + "/"
            entry[title] = [page, *(uri for uri in made if uri.startswith(folder))]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made."""
    from mkdocs.structure.files import File

    for uri, content in {**root_pages(), **examples(), **reference()}.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads links to where they lead in the site."""
    del config, files
    uri = page.file.src_uri
    return outside_fences(markdown, lambda text: relinked(text, uri))


def on_post_build(config: Any) -> None:
    """The site loads nothing from elsewhere, and its reference has all `members`.

    Raises:
        PluginError: Names the page and what it loads, or the member without entry.
    """
    from mkdocs.exceptions import PluginError

    for page in Path(config.site_dir).rglob("*.html"):
        if found := _LOADED.search(page.read_text()):
            raise PluginError(f"{page} loads {found[1]}: put it into docs/ instead")
    for page in _reference():
        made = Path(config.site_dir, "reference", f"{page['file']}.html").read_text()
        for name in page["names"]:
            for member in members(name):
                if f' id="{place(name)}.{member}"' not in made:
                    raise PluginError(f"the reference has no entry zs.{name}.{member}")


def pages() -> dict[str, str]:
    """Path in the repository -> page of the site, for all that is written by hand."""
    docs = [path.relative_to(ROOT) for path in sorted((ROOT / "docs").rglob("*.md"))]
    written = {path.as_posix(): path.relative_to("docs").as_posix() for path in docs}
    shown = {f"examples/{path.name}": _example_uri(path) for path in _examples()}
    return {**written, **FROM_ROOT, **shown, "examples": "examples.md"}


def root_pages() -> dict[str, str]:
    return {uri: (ROOT / name).read_text() for name, uri in FROM_ROOT.items()}


def examples() -> dict[str, str]:
    """A page for each example, with its source, and one that lists them."""
    found, lines = {}, ["# Examples", ""]
    for path in _examples():
        uri = _example_uri(path)
        found[uri], first = (_notebook if path.suffix == ".ipynb" else _script)(path)
        lines.append(f"- [`{path.name}`](examples/{path.name}): {first}")
    return {"examples.md": "\n".join(lines) + "\n", **found}


def reference() -> dict[str, str]:
    """A page for each table of reference.toml, and one that lists them."""
    made, lines = {}, ["# Reference", "", "`import zstrat as zs`", ""]
    for page in _reference():
        uri = f"reference/{page['file']}.md"
        parts = [f"# {page['title']}", page["about"].strip()]
        for name in page["names"]:
            shown = json.dumps(members(name))
            options = f"      heading: zs.{name}\n      toc_label: {name}\n"
            options += f"      members: {shown}\n      inherited_members: {shown}\n"
            options += f"      show_bases: {json.dumps(_has_public_bases(name))}\n"
            options += f"      merge_init_into_class: {json.dumps(_is_called(name))}"
            parts.append(f"::: {place(name)}\n    options:\n{options}")
            parts += _inherited_links(name)
        made[uri] = "\n\n".join(parts) + "\n"
        about = page["about"].strip().split(". [")[0].rstrip(".").replace("\n", " ")
        lines.append(f"- [{page['title']}]({uri}): {about}.")
    return {"reference.md": "\n".join(lines) + "\n", **made}


def place(name: str) -> str:
    """Where a public name is found in the source: ``ClusterCoordinator`` is
    ``zstrat.coordinator.ClusterCoordinator``."""
    first, _, rest = name.partition(".")
    found = getattr(zstrat, first)
    if isinstance(found, ModuleType):
        return f"{found.__name__}.{rest}"
    return f"{homes_of('zstrat')[first][0]}.{name}"


def members(name: str) -> list[str]:
    """Names of the members that the reference shows with a class: all that are public,
    also those of its bases, but for ``[internal]`` of reference.toml, and for what the
    reference shows with one of the bases."""
    return [member for member, shown in _shown_at(name).items() if shown == name]


def inherited(name: str) -> dict[str, str]:
    """The other public members of a class -> the base with which they are shown."""
    return {member: at for member, at in _shown_at(name).items() if at != name}


@functools.cache
def _shown_at(name: str) -> dict[str, str]:
    """Each public member of a class -> the class of the reference that shows it."""
    if name not in classes():
        return {}
    kind = classes()[name]
    names = {each: name for name, each in classes().items()}
    bases = [each for each in kind.__mro__ if each in names]
    hidden = {each for base in bases for each in _internal().get(names[base], ())}
    found = {}
    for member, owner in _public(kind).items():
        shown = [names[base] for base in bases if _public(base).get(member) is owner]
        if member not in hidden:
            found[member] = shown[-1]
    return found


@functools.cache
def _public(kind: type) -> dict[str, type]:
    """The public members of a class -> the nearest base that has them. Attributes that
    ``__init__`` assigns count if they have a docstring."""
    found: dict[str, type] = {}
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] != "zstrat":
            continue
        for member in (*inspect.get_annotations(each), *vars(each), *_assigned(each)):
            if not member.startswith("_"):
                found.setdefault(member, each)
    return found


def _assigned(kind: type) -> Iterator[str]:
    try:
        source = inspect.getsource(vars(kind)["__init__"])
    except (KeyError, TypeError, OSError):  # none, or not written by hand
        return
    (function,) = ast.parse(textwrap.dedent(source)).body
    for line, after in pairwise(getattr(function, "body", ())):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            target = re.match(r"self\.(\w+)[ :]", ast.unparse(line))
            if target is not None:
                yield target[1]


def _has_public_bases(name: str) -> bool:
    """Whether what a class is made of are Python's own and those of the reference."""
    bases = classes()[name].__bases__ if name in classes() else ()
    public = {*classes().values()}
    return all(each in public or each.__module__ == "builtins" for each in bases)


def _is_called(name: str) -> bool:
    """Whether programs call a class to make an object."""
    kind: Any = classes().get(name, object)
    given: list[Any] = [
        classes()[base] for base, each in _internal().items() if "__init__" in each
    ]
    return not any(
        issubclass(kind, base) and kind.__init__ is base.__init__ for base in given
    )


def _inherited_links(name: str) -> list[str]:
    """A paragraph with links to what a class inherits, for each base that shows it."""
    by_base: dict[str, list[str]] = {}
    for member, base in inherited(name).items():
        by_base.setdefault(base, []).append(f"[`{member}`][{place(base)}.{member}]")
    last = name.rpartition(".")[2]
    return [
        f"`{last}` inherits from [`zs.{base}`][{place(base)}]: {', '.join(links)}."
        for base, links in by_base.items()
    ]


@functools.cache
def classes() -> dict[str, type]:
    """The classes of the reference, by name."""
    names = [name for page in _reference() for name in page["names"]]
    found = {name: operator.attrgetter(name)(zstrat) for name in names}
    return {name: each for name, each in found.items() if isinstance(each, type)}


def relinked(text: str, uri: str) -> str:
    """The text of a page with its links as they are in the site."""
    by_uri = {site: path for path, site in pages().items()}
    origin = by_uri.get(uri, f"docs/{uri}")
    text = _LINK.sub(lambda link: _relinked(link, origin, uri), text)
    return _KEYS.sub(lambda found: "\\[" if found[1] else found[0], text)


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Changes all but fenced code; a fence keeps its language alone, as
    "```python servers" is one of Python here."""
    return "".join(
        re.sub(r"\A(`{3,}\w*)[^\n]*", r"\1", part) if is_code else change(part)
        for is_code, part in _parts(markdown)
    )


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    place = 0
    for fence in re.finditer(r"^(`{3,}).*?^\1$", markdown, re.MULTILINE | re.DOTALL):
        yield False, markdown[place : fence.start()]
        yield True, fence.group()
        place = fence.end()
    yield False, markdown[place:]


def _relinked(link: re.Match[str], origin: str, uri: str) -> str:
    text, target = link.groups()
    file, _, anchor = target.partition("#")
    if not file or ":" in file:
        return link.group()
    if (name := _NAME.fullmatch(text)) and (found := _documented(name[1])):
        return f"[{text}][{found}]"
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), file))
    there = pages().get(path)
    if there is None and (ROOT / "docs" / file).suffix == ".md":
        return link.group()  # of one page that is made to another
    if there is None:
        return text
    here = posixpath.relpath(there, posixpath.dirname(uri) or ".")
    return f"[{text}]({here}{'#' + anchor if anchor else ''})"


def _documented(name: str) -> str:
    """The place of the longest beginning of a name that is in the reference."""
    names = {each for page in _reference() for each in page["names"]}
    rest = name
    while rest and rest not in names:
        rest = rest.rpartition(".")[0]
    member = name.removeprefix(rest).removeprefix(".")
    shown = _shown_at(rest).get(member) if rest else None
    return f"{place(shown)}.{member}" if shown else place(rest) if rest else ""


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs" / "reference.toml").read_text())


def _reference() -> list[dict[str, Any]]:
    return _tables()["page"]


def _internal() -> dict[str, list[str]]:
    return _tables()["internal"]


def _examples() -> list[Path]:
    folder = ROOT / "examples"
    return sorted([*folder.glob("*.py"), *folder.glob("*.ipynb")])


def _example_uri(path: Path) -> str:
    return f"examples/{path.name.replace('.', '_')}.md"


def _script(path: Path) -> tuple[str, str]:
    """The page of a script, and the first sentence of its docstring."""
    source = path.read_text()
    first = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
    return f"# {path.name}\n\n```python\n{source}```\n", first.replace("\n", " ")


def _notebook(path: Path) -> tuple[str, str]:
    """The cells of a notebook one after the other, and the first sentence of it."""
    parts = [f"# {path.name}"]
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = f"```python\n{source}\n```"
        parts.append(re.sub(r"\A# .*\n*", "", source))
    return "\n\n".join(parts) + "\n", parts[1].partition("\n\n")[0].replace("\n", " ")
