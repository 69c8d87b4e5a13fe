"""The law of the floors and doors, read from the imports of the source.

A module imports from its own package, from a strictly lower floor, or from a door that
it owns. An import inside a function is for doors alone, and for modules that bring jax
with them: a task learns what it is before it loads what it needs.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]

FLOORS = {
    "zstrat.errors": 0,
    "zstrat.config": 0,
    "zstrat.doors": 0,
    "zstrat.memory": 0,
    "zstrat.rows": 0,
    "zstrat.native": 0,
    "zstrat.threads": 0,
    "zstrat.paths": 0,
    "zstrat.signals": 0,
    "zstrat.streams": 0,
    "zstrat.ids": 0,
    "zstrat.initializers": 0,
    "zstrat.jaxprs": 0,
    "zstrat.wire": 1,
    "zstrat.telemetry": 1,
    "zstrat.cluster": 2,
    "zstrat.transport": 2,
    "zstrat.codecs": 2,
    "zstrat.data": 2,
    "zstrat.checkpoint": 2,
    "zstrat.optimizers": 2,
    "zstrat.variables": 3,
    "zstrat.collectives": 3,
    "zstrat.ps": 3,
    "zstrat.tpu": 3,
    "zstrat.program": 4,
    "zstrat.worker": 5,
    "zstrat.coordinator": 6,
    "zstrat.strategy": 7,
    "zstrat.launch": 8,
    "zstrat.saving": 8,
    "zstrat.compat": 8,
    "zstrat.contrib": 8,
    "zstrat.cli": 9,
    "zstrat.experimental": 9,
    "zstrat.integrations": 9,
    "zstrat.testing": 9,
    "zstrat.daemons": 10,
    "zstrat.__main__": 10,
}

DOORS = {
    "msgpack": "zstrat.wire",
    "ml_dtypes": "zstrat.wire",
    "zmq": "zstrat.transport",
    "uvloop": "zstrat.transport._loop",
    "optax": "zstrat.optimizers",
    "cloudpickle": "zstrat.program.ship._pickler",
    "greenlet": "zstrat.strategy.replica._fibers",
    "psutil": "zstrat.telemetry",
    "distributed": "zstrat.launch.fleet._dask",
    "ray": ("zstrat.launch.fleet._ray", "zstrat.integrations.ray"),
    "yaml": "zstrat.launch.manifests",
    "safetensors": "zstrat.checkpoint",
    "xxhash": ("zstrat.checkpoint", "zstrat.ids"),
    "grain": "zstrat.data",
    "pyarrow": "zstrat.data.files._parquet",
    "orbax": "zstrat.saving",
    "tensorboardX": "zstrat.saving",
    "kubernetes": "zstrat.cluster._kubernetes",
    "urllib3": "zstrat.cluster._kubernetes",
    "google": "zstrat.cluster._google",
    "googleapiclient": "zstrat.cluster._google",
    "http": "zstrat.cluster._google",
    "opentelemetry": "zstrat.telemetry.timeline._otlp",
    "prometheus_client": "zstrat.transport.health._register",
    "tomllib": "zstrat.config",
    "click": "zstrat.cli",
    "keras": "zstrat.integrations.keras",
    "rich": ("zstrat.cli", "zstrat.coordinator._leased_datasets"),
}

JAX_AT_IMPORT = {
    "zstrat.jaxprs",
    "zstrat.variables",
    "zstrat.program",
    "zstrat.worker",
    "zstrat.coordinator",
    "zstrat.strategy",
    "zstrat.saving",
    "zstrat.contrib",
}
JAX_WHEN_NEEDED = {
    "zstrat.codecs",
    "zstrat.optimizers",
    "zstrat.collectives",
    "zstrat.ps",
    "zstrat.tpu",
    "zstrat.integrations",
}
"""Modules of it that import jax are imported late: see tests/test_imports.py."""

HEAVY = ("jax", "jaxlib", "optax")

TENSORFLOWS_NAMES = {"CheckpointManager"}
"""Public words that we keep where the idea is TF's."""

FORBIDDEN_NAMES = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "base",
    "manager",
    "misc",
}


@dataclass(frozen=True)
class Import:
    module: str
    target: str
    line: int
    in_function: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> Iterator[tuple[str, Path]]:
    for folder in ("zstrat", "daemons"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if folder == "daemons":
                dotted = "zstrat." + dotted
            yield dotted.removesuffix(".__init__"), path


@cache
def trees() -> dict[str, ast.Module]:
    return {name: _tree(path) for name, path in modules()}


def _tree(path: Path) -> ast.Module:
    """What a stub beside it says is imported there, for types: it is fetched late."""
    tree = ast.parse(path.read_text())
    stub = path.with_suffix(".pyi")
    if stub.exists():
        for_types = ast.Name("TYPE_CHECKING")
        tree.body.append(ast.If(for_types, ast.parse(stub.read_text()).body, []))
    return tree


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(trees()[module]))


PACKAGES = {name for name, path in modules() if path.name == "__init__.py"}


def floor_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


@cache
def imports() -> list[Import]:
    return [
        found for module, tree in trees().items() for found in _imports(module, tree)
    ]


def _imports(
    module: str, node: ast.AST, late: bool = False, types: bool = False
) -> Iterator[Import]:
    """Those in this node; ``late`` in a function, ``types`` in an if for types."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        for to in _targets(module, node):
            yield Import(module, to, node.lineno, late, types)
        return
    if isinstance(node, ast.expr):
        return  # nothing is imported in an expression
    late, types = late or _is_function(node), types or _is_for_types(node)
    for child in ast.iter_child_nodes(node):
        yield from _imports(module, child, late, types)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _targets(module: str, node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    start = node.module or ""
    if node.level:
        parts = module.split(".")
        up = node.level - (module in PACKAGES)
        package = ".".join(parts[: len(parts) - up])
        start = f"{package}.{start}".rstrip(".")
    names = [f"{start}.{alias.name}" for alias in node.names]
    return [name if name in trees() else start for name in names]


def ours(target: str) -> bool:
    return target == "zstrat" or target.startswith("zstrat.")


def edges() -> list[Import]:
    return [i for i in imports() if ours(i.target) and i.module != "zstrat"]


def test_every_package_has_a_floor() -> None:
    assert {floor_of(m) for m, _ in modules()} == set(FLOORS) | {"zstrat"}


def test_imports_go_down() -> None:
    wrong = [
        str(edge)
        for edge in edges()
        if edge.target != "zstrat"
        and floor_of(edge.module) != floor_of(edge.target)
        and FLOORS[floor_of(edge.module)] <= FLOORS[floor_of(edge.target)]
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_needs_the_test_kit() -> None:
    kit = "zstrat.testing"
    found = [i for i in edges() if floor_of(i.target) == kit != floor_of(i.module)]
    assert not found, "\n".join(map(str, found))


def test_no_cycles() -> None:
    """Imports in functions count: they would only hide a cycle. So do those for types:
    whoever reads one file of a circle has to read all."""
    assert _circles(_graph(edges())) == []


def _graph(some: Iterable[Import]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for edge in some:
        graph.setdefault(edge.module, set()).add(edge.target)
    return graph


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The modules that reach each other. By Warshall's closure, a bit for a module."""
    names = sorted({*graph, *chain(*graph.values())})
    number = {name: at for at, name in enumerate(names)}
    reached = [0] * len(names)
    for name, targets in graph.items():
        reached[number[name]] = sum(1 << number[target] for target in targets)
    for middle in range(len(names)):
        for at, found in enumerate(reached):
            if found >> middle & 1:
                reached[at] |= reached[middle]
    circles: dict[int, set[str]] = {}
    for at, found in enumerate(reached):
        if found >> at & 1:
            together = sum(
                1 << n for n in range(len(names)) if found >> n & reached[n] >> at & 1
            )
            circles.setdefault(together, set()).add(names[at])
    return list(circles.values())


def test_private_modules_stay_within_their_package() -> None:
    """Others ask at a door: that of the package, or of one of its sub-packages."""
    wrong = [
        str(edge)
        for edge in edges()
        if floor_of(edge.module) != floor_of(edge.target)
        and any(part.startswith("_") for part in edge.target.split("."))
    ]
    assert not wrong, "\n".join(wrong)


SMALL = {
    "zstrat.__main__": "started by name",
    "zstrat.cli.__main__": "started by name",
}
"""Files of 60 lines or less that one file imports; in `contrib`, `compat` and
`experimental` TF's paths decide what is a file."""


def test_a_file_is_a_concept() -> None:
    """And no fragment of one, which its only reader has to look up elsewhere."""
    readers: dict[str, set[str]] = {}
    for edge in edges():
        readers.setdefault(edge.target, set()).add(edge.module)
    small = {
        name
        for name, path in modules()
        if path.name != "__init__.py"
        and path.read_text().count("\n") <= 60
        and len(readers.get(name, ())) <= 1
        and not any(part.startswith("experimental") for part in name.split("."))
        and floor_of(name) not in ("zstrat.compat", "zstrat.contrib")
    }
    assert small == set(SMALL)


def test_a_folder_can_be_seen_at_once() -> None:
    sizes: dict[Path, int] = {}
    for _, path in modules():
        sizes[path.parent] = sizes.get(path.parent, 0) + 1
    assert not {folder: count for folder, count in sizes.items() if count > 24}


def test_one_door_per_dependency() -> None:
    wrong = []
    for found in imports():
        owner = DOORS.get(found.target.split(".")[0])
        owners = (owner,) if isinstance(owner, str) else owner or ()
        if owner and not f"{found.module}.".startswith(tuple(f"{o}." for o in owners)):
            wrong.append(f"{found}: the door is {owner}")
    assert not wrong, "\n".join(wrong)


def test_who_may_import_jax() -> None:
    wrong = [
        str(found)
        for found in imports()
        if found.target.split(".")[0] in ("jax", "jaxlib")
        and floor_of(found.module) not in JAX_AT_IMPORT | JAX_WHEN_NEEDED
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_in_functions_are_for_doors() -> None:
    doors = {*DOORS, *HEAVY}
    wrong = [
        str(found)
        for found in imports()
        if found.in_function
        and found.target.split(".")[0] not in doors
        and found.target not in brings_jax() | JAX_AT_IMPORT
    ]
    assert not wrong, "\n".join(wrong)


@cache
def brings_jax() -> set[str]:
    """Modules that cannot be imported without jax, or without what imports it."""
    at_once = [i for i in imports() if not i.in_function and not i.for_types]
    heavy: set[str] = set()
    while True:
        more = {
            found.module
            for found in at_once
            if found.target.split(".")[0] in HEAVY or found.target in heavy
        }
        if more <= heavy:
            return heavy
        heavy |= more


def test_environment_is_read_in_one_place() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in trees().items()
        if floor_of(module) not in ("zstrat.config", "zstrat.daemons")
        for node in nodes(module)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    ]
    assert not wrong, "zstrat.config reads the environment: " + ", ".join(wrong)


def test_names_say_what_a_thing_is() -> None:
    parts = {part.strip("_") for module, _ in modules() for part in module.split(".")}
    assert not parts & FORBIDDEN_NAMES
    for module in trees():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef) and node.name not in TENSORFLOWS_NAMES:
                assert not node.name.endswith("Manager"), f"{module}.{node.name}"


def test_a_public_name_means_one_thing() -> None:
    """Two packages may not show different things under the same name. Those that have
    TF's old paths do: a name may have meant something else there. A module of a
    package (``from . import x``) has its name within that package."""
    origins: dict[str, set[str]] = {}
    for package in PACKAGES - {"zstrat"}:
        if floor_of(package) in ("zstrat.compat", "zstrat.contrib"):
            continue
        for node in trees()[package].body:
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                for alias in node.names:
                    name = alias.asname or alias.name
                    origins.setdefault(name, set()).add(f"{package}.{node.module}")
    shared = {name: found for name, found in origins.items() if len(found) > 1}
    assert not shared


def test_a_class_has_a_name_of_its_own() -> None:
    """In its package, private ones too; in another one the plain word may be another
    class. TF's strategies of 1.12 have TF's names."""
    places: dict[tuple[str, str], list[str]] = {}
    for module in trees():
        package = floor_of(module)
        for node in nodes(module):
            if isinstance(node, ast.ClassDef) and package != "zstrat.contrib":
                places.setdefault((package, node.name), []).append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_nothing_sleeps_and_every_task_has_a_name() -> None:
    wrong = []
    for module in trees():
        for node in nodes(module):
            if not isinstance(node, ast.Call):
                continue
            called = _dotted(node.func)
            keywords = {keyword.arg for keyword in node.keywords}
            if called == "time.sleep":
                wrong.append(f"{module}:{node.lineno} sleeps")
            if called.endswith("create_task") and "name" not in keywords:
                wrong.append(f"{module}:{node.lineno} starts a task without a name")
            if called == "hasattr":
                wrong.append(f"{module}:{node.lineno} asks hasattr: use a type")
    assert not wrong, "\n".join(wrong)


def _dotted(node: ast.expr) -> str:
    """Names with dots between; before them, nothing of another expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_dotted(node.value)}.{node.attr}"
    return ""


def test_pyproject_lists_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(PACKAGES)


def test_constraints_pin_every_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *chain(*project["optional-dependencies"].values()),
    ]
    names = {_canonical(requirement) for requirement in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(
        pin.count("==") == 1 and " " not in pin and "/" not in pin for pin in pins
    )
    assert names <= {_canonical(pin) for pin in pins}


def _canonical(requirement: str) -> str:
    name = requirement
    for end in "<>=!~;[ ":
        name = name.split(end)[0]
    return name.lower().replace("_", "-").replace(".", "-")
