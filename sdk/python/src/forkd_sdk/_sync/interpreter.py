# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""The room `interpreter` of a sandbox: code in the warm interpreter. Its variables survive from call to call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from forkd_sdk._wire import without_none
from forkd_sdk.errors import EvalError
from forkd_sdk.models import Evaluation

if TYPE_CHECKING:
    from forkd_sdk._sync.http import Http

_GRACE = 30.0


class Interpreter:
    """Runs code without starting a process."""

    def __init__(self, http: Http, base: str) -> None:
        self._http = http
        self._base = base

    def run(self, code: str, timeout: float | None = None) -> Evaluation:
        """Runs code. An exception in the guest is part of the result."""
        seconds = None if timeout is None else max(1, math.ceil(timeout))
        wait = max(self._http.timeout, (seconds or 0) + _GRACE)
        answer = self._http.json(
            "POST", f"{self._base}/eval", json=without_none(code=code, timeout_secs=seconds), timeout=wait
        )
        return Evaluation.read(answer)

    def eval(self, code: str, timeout: float | None = None) -> Any:
        """The value of an expression. An exception in the guest is raised as `EvalError`."""
        result = self.run(code, timeout)
        if result.error is not None:
            raise EvalError(result)
        return result.value
