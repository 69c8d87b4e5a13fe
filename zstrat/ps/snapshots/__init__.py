"""Values of one moment on their way to files, and values that come from files."""

from __future__ import annotations
