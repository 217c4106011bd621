"""Python imports this by itself when its folder is on the path: the process has a wrong clock."""

from __future__ import annotations

import datetime as datetime_module
import os
import time
from typing import Any

_OFFSET = float(os.environ["CHAOS_CLOCK_OFFSET"])
_right_time = time.time
_right_time_ns = time.time_ns
_RightDatetime = datetime_module.datetime


class _AnyDatetime(type):
    """Datetimes made by C code are instances too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _RightDatetime)


class _WrongDatetime(_RightDatetime, metaclass=_AnyDatetime):
    __slots__ = ()  # C code expects the size of the right one

    @classmethod
    def now(cls, tz: datetime_module.tzinfo | None = None) -> Any:
        return _RightDatetime.now(tz) + datetime_module.timedelta(seconds=_OFFSET)

    @classmethod
    def utcnow(cls) -> Any:
        right = _RightDatetime.now(datetime_module.timezone.utc).replace(tzinfo=None)
        return right + datetime_module.timedelta(seconds=_OFFSET)


time.time = lambda: _right_time() + _OFFSET
time.time_ns = lambda: _right_time_ns() + int(_OFFSET * 1_000_000_000)
setattr(datetime_module, "datetime", _WrongDatetime)  # noqa: B010 - to mypy it is a type
