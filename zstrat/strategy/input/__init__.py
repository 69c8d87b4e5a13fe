"""Datasets that are shared out among workers and replicas."""

from __future__ import annotations
