"""The site shows a class of `zstrat.dataclass` as the dataclass that it is: with the
arguments of its constructor."""

from __future__ import annotations

from typing import Any

import griffe


class Dataclasses(griffe.Extension):
    """Takes our decorator for that of the standard library."""

    def on_alias_instance(self, *, alias: griffe.Alias, **_: Any) -> None:
        if alias.target_path == "zstrat.dataclass.dataclass":
            alias.target_path = "dataclasses.dataclass"
