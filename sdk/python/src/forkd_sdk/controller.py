"""The class `Controller` of the `forkd` 0.5.3 client, with its methods and defaults."""

from __future__ import annotations

from typing import Any

from forkd_sdk._sync.client import Client


class Controller:
    """The REST API, method by method. Answers are the daemon's JSON."""

    def __init__(self, base_url: str | None = None, token: str | None = None, timeout: float = 60.0) -> None:
        self._client = Client(base_url, token, timeout=timeout)

    def list_snapshots(self) -> Any:
        return self._client.http.json("GET", "/v1/snapshots")

    def delete_snapshot(self, tag: str) -> Any:
        return self._client.http.json("DELETE", f"/v1/snapshots/{tag}")

    def spawn_sandboxes(
        self,
        snapshot_tag: str,
        n: int = 1,
        per_child_netns: bool = False,
        memory_limit_mib: int | None = None,
        prewarm: bool = False,
        live_fork: bool = False,
        hugepages: bool = False,
    ) -> Any:
        body: dict[str, Any] = {"snapshot_tag": snapshot_tag, "n": n, "per_child_netns": per_child_netns}
        if memory_limit_mib is not None:
            body["memory_limit_mib"] = memory_limit_mib
        body.update({name: True for name, given in (("prewarm", prewarm), ("live_fork", live_fork), ("hugepages", hugepages)) if given})
        return self._client.http.json("POST", "/v1/sandboxes", json=body)

    def list_sandboxes(self) -> Any:
        return self._client.http.json("GET", "/v1/sandboxes")

    def get_sandbox(self, sandbox_id: str) -> Any:
        return self._client.http.json("GET", f"/v1/sandboxes/{sandbox_id}")

    def kill_sandbox(self, sandbox_id: str) -> Any:
        return self._client.http.json("DELETE", f"/v1/sandboxes/{sandbox_id}")

    def branch_sandbox(
        self,
        sandbox_id: str,
        tag: str | None = None,
        diff: bool = False,
        measure_diff: bool = False,
        mode: str | None = None,
        wait: bool = True,
    ) -> Any:
        body: dict[str, Any] = {}
        if tag is not None:
            body["tag"] = tag
        if mode is not None:
            body["mode"] = mode
        elif diff:
            body["diff"] = True
        if measure_diff:
            body["measure_diff"] = True
        if not wait:
            body["wait"] = False
        return self._client.http.json("POST", f"/v1/sandboxes/{sandbox_id}/branch", json=body)

    def exec_command(self, sandbox_id: str, args: list[str], timeout_secs: int = 30) -> Any:
        body = {"args": args, "timeout_secs": timeout_secs}
        return self._client.http.json("POST", f"/v1/sandboxes/{sandbox_id}/exec", json=body, timeout=timeout_secs + 30.0)

    def eval_code(self, sandbox_id: str, code: str) -> Any:
        return self._client.http.json("POST", f"/v1/sandboxes/{sandbox_id}/eval", json={"code": code})

    def ping_sandbox(self, sandbox_id: str) -> Any:
        return self._client.http.json("POST", f"/v1/sandboxes/{sandbox_id}/ping")
