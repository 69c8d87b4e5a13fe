"""What XLA compiles for the processes of pytest, kept for all of them and for the next
session.

Tests make the same programs again and again: each rank, each trace, each sum of a few
numbers. jax finds what is compiled by the whole program, the settings and the version
of XLA, in the files of its compilation cache. Daemons and programs that tests start
have no cache, as they have none at users'.
"""

import hashlib
import os
import tempfile
from pathlib import Path

_MACHINE = [
    line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line
][:1]
"""What its processor knows: code for another one would not run here."""
FOLDER = (
    Path(__file__).parents[1]
    / ".pytest_cache/compiled"
    / hashlib.sha256(repr(_MACHINE).encode()).hexdigest()[:16]
)
"""`make clean` removes it."""


def keep():
    """Has jax, which is imported here, look there before it compiles."""
    import jax
    from jax._src.lru_cache import LRUCache

    LRUCache.put = _put
    for name, value in {
        "jax_compilation_cache_dir": str(FOLDER),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
        "jax_persistent_cache_enable_xla_caches": "none",
    }.items():
        jax.config.update(name, value)


def _put(self, key, value):
    """As that of jax, which another thread or process may see half written."""
    path = Path(self.path) / f"{key}-cache"
    if not path.exists():
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(value)
        Path(name).replace(path)
