"""A router for commands that must not connect."""

from __future__ import annotations

from typing import Any


class NothingToMigrate:
    """Says that no model lives in any database, so that `makemigrations` looks at none."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        """Never."""
        return False
