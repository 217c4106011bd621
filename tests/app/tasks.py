"""Handlers that autodiscovery finds under the other name."""

from __future__ import annotations

from django_jobqueue import handler


@handler
def found_in_tasks() -> str:
    """Say that this module was found."""
    return "found"
