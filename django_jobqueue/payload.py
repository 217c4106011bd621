"""JSON that comes back from PostgreSQL as it was given, or an error that names the place.

| given | stored |
| --- | --- |
| dict with string keys, list, str, int, bool, None | as it is |
| float | as it is, below 1e16: `jsonb` gives larger ones back as integers |
| tuple | as a list, as `django.tasks` does |
| subclass of one of these: `SafeString`, `TextChoices`, `IntEnum`, named tuple | as that type |
| everything else: bytes, set, datetime, Decimal, UUID, model, … | refused |
| NaN, infinity, NUL, a lone surrogate, a key that is no string | refused |
| more than 200 lists and dicts inside each other | refused |
"""

from __future__ import annotations

import json
from typing import Any

from django_jobqueue.exceptions import InvalidPayload
from django_jobqueue.values import plain, unstorable_text

#: From here on `jsonb` prints a float without a fraction, and Python reads it back as an int.
_FLOAT_LIMIT = 1e16
#: What one process could nest, another with less room on its stack could not read again.
_DEEPEST = 200
_PLACE_SHOWN = 80


def checked_payload(payload: object, *, limit: int) -> tuple[dict[str, Any], str]:
    """The payload as the handler will get it, and its JSON text of at most `limit` bytes."""
    if payload is None:
        payload = {}
    if not isinstance(payload, dict):
        raise InvalidPayload(
            "The payload must be a dict of the handler's keyword arguments,"
            f" not {type(payload).__name__}."
        )
    kept, text = checked_json(payload, what="payload")
    _check_size(text, "payload", limit, "MAX_PAYLOAD_BYTES")
    return kept, text


def checked_result(result: object, *, limit: int) -> Any:
    """What a handler returned, as it will come back: of at most `limit` bytes as JSON."""
    kept, text = checked_json(result, what="The result")
    _check_size(text, "result", limit, "MAX_RESULT_BYTES")
    return kept


def checked_json(value: Any, *, what: str) -> tuple[Any, str]:
    """The value as it will come back, and its JSON text.

    `what` names the value in the error: `payload.items[3]`, `result`.
    """
    try:
        text = _dumped(value)
        # Comparing what would come back finds every silent conversion at the speed of C.
        if _surely_storable(text) and (kept := json.loads(text)) == value:
            return kept, text
    except (TypeError, ValueError, RecursionError):
        pass
    return _normalised_json(value, what)


def _check_size(text: str, what: str, limit: int, setting: str) -> None:
    if (size := len(text.encode())) > limit:
        raise InvalidPayload(
            f"The {what} takes {size:,} bytes as JSON. The limit ({setting}) is {limit:,}."
            " Store the data elsewhere and pass its key."
        )


def _normalised_json(value: Any, what: str) -> tuple[Any, str]:
    try:
        kept = _normalised(value, what, _DEEPEST)
        return kept, _dumped(kept)
    except InvalidPayload:
        raise
    except ValueError as error:  # an integer of more than 4,300 digits
        raise InvalidPayload(f"{what} cannot be written as JSON: {error}.") from None


def _dumped(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _surely_storable(text: str) -> bool:
    """Whether the text needs no slow look. Harmless texts may fail, bad ones never pass."""
    return (
        "\\u0000" not in text
        and "e+" not in text  # stands in every float from 1e16 on
        and text.count("[") + text.count("{") <= _DEEPEST
        and unstorable_text(text) is None
    )


def _normalised(value: Any, place: str, depth_left: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _storable_text(value, place)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _storable_float(value, place)
    if isinstance(value, (dict, list, tuple)) and not depth_left:
        raise InvalidPayload(
            f"{place[:_PLACE_SHOWN]}… is nested deeper than {_DEEPEST} levels, or contains itself."
        )
    if isinstance(value, dict):
        return {
            _storable_key(key, place): _normalised(
                item, f"{place}.{key[:_PLACE_SHOWN]}", depth_left - 1
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            _normalised(item, f"{place}[{index}]", depth_left - 1)
            for index, item in enumerate(value)
        ]
    raise InvalidPayload(
        f"{place} is of type {type(value).__name__}, which is not JSON."
        " Pass a string, a number or the key of a row instead."
    )


def _storable_key(key: object, place: str) -> str:
    if not isinstance(key, str):
        raise InvalidPayload(
            f"{place} has a key of type {type(key).__name__}. JSON keys are strings."
        )
    if problem := unstorable_text(key):
        raise InvalidPayload(f"{place} has a key with {problem}, which PostgreSQL cannot store.")
    return plain(key)


def _storable_text(value: str, place: str) -> str:
    if problem := unstorable_text(value):
        raise InvalidPayload(f"{place} contains {problem}, which PostgreSQL cannot store.")
    return plain(value)


def _storable_float(value: float, place: str) -> float:
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidPayload(
            f"{place} is {value}, which JSON does not know. Pass None or a string."
        )
    if abs(value) >= _FLOAT_LIMIT:
        raise InvalidPayload(
            f"{place} is {value}: PostgreSQL gives floats from 1e16 on back as integers."
            " Pass an int or a string."
        )
    return float(value)
