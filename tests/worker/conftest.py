"""What several tests of the worker need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection

from tests.onlooker import Onlooker, looking_on


@pytest.fixture
def request_settings() -> Any:
    """Change the settings that requests use; they are put back."""
    before = dict(connection.settings_dict)
    connection.close()
    yield connection.settings_dict
    connection.close()
    connection.settings_dict.clear()
    connection.settings_dict.update(before)


@pytest.fixture
def onlooker() -> Iterator[Onlooker]:
    """Counts sessions for as long as the test takes."""
    with looking_on() as onlooker:
        yield onlooker
