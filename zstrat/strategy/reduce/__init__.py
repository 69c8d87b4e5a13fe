"""Values of replicas brought together: on one device, over several, over processes."""

from __future__ import annotations
