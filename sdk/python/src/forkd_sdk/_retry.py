"""When a request is repeated, and after which time.

A request that the daemon has not seen is always repeated: the connection failed, or the answer was 429. A request that
the daemon may have executed is repeated only if a second execution is harmless: GET, PUT, DELETE, and requests with an
idempotency key that the daemon honours.
"""

from __future__ import annotations

import random
from typing import cast

# Codes that a later attempt can change. Other refusals are final, whatever their status.
_TRANSIENT = frozenset({"rate_limited", "busy", "shutting_down"})
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 5.0


def is_transient(status: int, body: object, harmless: bool) -> bool:
    """Whether to repeat a refused request."""
    code = cast("dict[str, object]", body).get("code") if isinstance(body, dict) else None
    if status == 429:
        return True
    if not harmless:
        return False
    # Without a code the answer is not the daemon's: a proxy between could not reach it.
    return code in _TRANSIENT if code is not None else status in (502, 503, 504)


def delay(attempt: int, retry_after: str | None) -> float:
    """Seconds to wait before the given repetition (0 is the first). The daemon's wish has precedence, up to 30 s."""
    try:
        wished = float(retry_after) if retry_after else 0.0
    except ValueError:
        wished = 0.0
    if wished > 0:
        return min(wished, 30.0)
    top = min(_LONGEST_DELAY, _FIRST_DELAY * 2**attempt)
    return random.uniform(top / 2, top)
