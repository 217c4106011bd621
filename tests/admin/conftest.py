"""Who sits at the admin.

Nothing of Django is imported while this loads: pytest reads it before the settings are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from django.contrib.auth.models import User
    from django.test import Client


@pytest.fixture
def operator(db: None) -> User:
    """Somebody who may see, requeue and cancel."""
    from tests.admin.scene import person

    return person("view_processingjob", "requeue_processingjob", "cancel_processingjob")


@pytest.fixture
def operators_client(operator: User) -> Client:
    from tests.admin.scene import client_of

    return client_of(operator)


@pytest.fixture
def viewers_client(db: None) -> Client:
    from tests.admin.scene import client_of, person

    return client_of(person("view_processingjob"))
