"""Reading JSON objects of the daemon into typed values. A field of the wrong type is a `ProtocolError`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar, cast

from forkd_sdk.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Fields:
    """The fields of one JSON object."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise ProtocolError(f"{what}: expected a JSON object, got {type(value).__name__}")
        self.fields = cast("dict[str, Any]", value)
        self._what = what

    def _wrong(self, name: str) -> ProtocolError:
        return ProtocolError(f"{self._what}: field {name!r} is missing or malformed")

    def raw(self, name: str) -> Any:
        """The field as it is, or None."""
        return self.fields.get(name)

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if not isinstance(value, str):
            raise self._wrong(name)
        return value

    def opt_text(self, name: str) -> str | None:
        return None if self.fields.get(name) is None else self.text(name)

    def number(self, name: str) -> int:
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name)
        return value

    def opt_number(self, name: str) -> int | None:
        return None if self.fields.get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """A boolean; a missing one is false."""
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            raise self._wrong(name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; a missing one is empty."""
        value: object = self.fields.get(name) or []
        if not isinstance(value, list):
            raise self._wrong(name)
        items = cast("list[object]", value)
        found = tuple(item for item in items if isinstance(item, str))
        if len(found) != len(items):
            raise self._wrong(name)
        return found

    def labels(self, name: str = "labels") -> dict[str, str]:
        """A map of strings; a missing one is empty."""
        value: object = self.fields.get(name) or {}
        if not isinstance(value, dict):
            raise self._wrong(name)
        return {str(key): str(item) for key, item in cast("dict[object, object]", value).items()}


def rows(value: object, what: str, read: Callable[[object], T]) -> list[T]:
    """A JSON list, each item read by `read`."""
    if not isinstance(value, list):
        raise ProtocolError(f"{what}: expected a JSON list, got {type(value).__name__}")
    return [read(item) for item in cast("list[object]", value)]


def parse_line(line: str | bytes, what: str) -> object:
    """One line of NDJSON."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise ProtocolError(f"{what}: a line is not JSON") from error


def is_keepalive(value: object) -> bool:
    """Whether a line of a stream only says that the connection is alive."""
    return isinstance(value, dict) and cast("dict[str, object]", value).get("type") == "keepalive"


def without_none(**fields: object) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
