"""The conformance suite of Pydantic AI for workspace backends, and a run of an agent without a model."""

import asyncio
import os

import pytest
from pydantic_ai.workspaces import WorkspaceRef
from pydantic_ai.workspaces.conformance import WorkspaceBackendSuite

from forkd_sdk.integrations.pydantic_ai import ForkdWorkspace

TAG = os.environ["FORKD_TEST_TAG"]


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
async def shared():
    workspace = ForkdWorkspace(TAG)
    await workspace.working_dir()
    yield workspace
    await workspace.close()


class TestForkd(WorkspaceBackendSuite):
    @pytest.fixture
    def backend(self, shared):
        return shared

    @pytest.fixture
    def fresh_backend(self):
        return lambda: ForkdWorkspace(TAG, ttl=600)

    @pytest.fixture
    def attach_backend(self):
        return lambda ref: ForkdWorkspace(ref=ref)

    @pytest.fixture
    def destroy_environment(self):
        async def destroy(backend):
            await backend.close()

        return destroy


@pytest.mark.anyio
async def test_a_fork_and_a_roll_back(shared):
    await shared.write_bytes("kept", b"one")
    await shared.checkpoint("before")
    (copy,) = await shared.fork()
    await copy.write_bytes("kept", b"of the copy")
    await shared.write_bytes("kept", b"two")
    assert await copy.read_bytes("kept") == b"of the copy"
    await shared.rollback("before")
    assert await shared.read_bytes("kept") == b"one"
    await copy.close()


def test_settings_are_checked():
    for wrong in ({}, {"tag": "x", "ref": WorkspaceRef(provider="forkd", id="x")}):
        with pytest.raises(ValueError):
            ForkdWorkspace(**wrong)
    assert asyncio.iscoroutinefunction(ForkdWorkspace("x").run)
