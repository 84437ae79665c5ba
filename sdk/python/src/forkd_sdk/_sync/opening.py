# Generated from `_async` by tools/generate_sync.py. Do not edit.
"""Making and finding sandboxes: the class that users see."""

from __future__ import annotations

from typing import Self

from forkd_sdk._sync.client import Client
from forkd_sdk._sync.sandbox import SandboxBase
from forkd_sdk.models import Network, SandboxInfo


class Opening(SandboxBase):
    """Adds the ways to get a sandbox. Without `client` the sandbox has a client of its own."""

    @classmethod
    def create(
        cls,
        tag: str,
        *,
        ttl: int | None = 3600,
        labels: dict[str, str] | None = None,
        memory_limit_mib: int | None = None,
        network: Network | None = None,
        idempotency_key: str | None = None,
        client: Client | None = None,
    ) -> Self:
        """Starts a child of a snapshot. The daemon deletes the child after `ttl` seconds (None: never).

        `network` is a mode such as `"public"`, or a policy with a mode and rules.
        """
        used = client or Client()
        children = used.spawn(
            cls,
            tag,
            ttl=ttl,
            labels=labels,
            memory_limit_mib=memory_limit_mib,
            network=network,
            idempotency_key=idempotency_key,
        )
        children[0]._owns_client = client is None
        return children[0]

    @classmethod
    def create_many(
        cls,
        tag: str,
        n: int,
        *,
        ttl: int | None = 3600,
        labels: dict[str, str] | None = None,
        memory_limit_mib: int | None = None,
        network: Network | None = None,
        idempotency_key: str | None = None,
        client: Client | None = None,
    ) -> list[Self]:
        """Starts `n` children of a snapshot."""
        used = client or Client()
        return used.spawn(
            cls,
            tag,
            n,
            ttl=ttl,
            labels=labels,
            memory_limit_mib=memory_limit_mib,
            network=network,
            idempotency_key=idempotency_key,
        )

    @classmethod
    def connect(cls, id: str, *, client: Client | None = None) -> Self:
        """A handle for a sandbox that runs."""
        used = client or Client()
        info = SandboxInfo.read(used.http.json("GET", f"/v1/sandboxes/{id}"))
        return cls.bind(used, info, owns_client=client is None)

    @classmethod
    def list(
        cls, *, tag: str | None = None, labels: dict[str, str] | None = None, client: Client | None = None
    ) -> list[SandboxInfo]:
        """The live sandboxes."""
        return (client or Client()).sandboxes(tag=tag, labels=labels)
