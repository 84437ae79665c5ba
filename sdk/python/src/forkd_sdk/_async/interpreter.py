"""The room `interpreter` of a sandbox: code in the warm interpreter. Its variables survive from call to call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from forkd_sdk._wire import without_none
from forkd_sdk.errors import EvalError
from forkd_sdk.models import Evaluation

if TYPE_CHECKING:
    from forkd_sdk._async.http import AsyncHttp

_GRACE = 30.0


class AsyncInterpreter:
    """Runs code without starting a process."""

    def __init__(self, http: AsyncHttp, base: str) -> None:
        self._http = http
        self._base = base

    async def run(self, code: str, timeout: float | None = None) -> Evaluation:
        """Runs code. An exception in the guest is part of the result."""
        seconds = None if timeout is None else max(1, math.ceil(timeout))
        wait = max(self._http.timeout, (seconds or 0) + _GRACE)
        answer = await self._http.json(
            "POST", f"{self._base}/eval", json=without_none(code=code, timeout_secs=seconds), timeout=wait
        )
        return Evaluation.read(answer)

    async def eval(self, code: str, timeout: float | None = None) -> Any:
        """The value of an expression. An exception in the guest is raised as `EvalError`."""
        result = await self.run(code, timeout)
        if result.error is not None:
            raise EvalError(result)
        return result.value
