"""The sandbox suite of langchain-tests, and an agent without a model."""

import os

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from forkd_sdk.integrations.deepagents import ForkdSandbox

TAG = os.environ["FORKD_TEST_TAG"]


class TestForkd(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self):
        with ForkdSandbox.create(TAG) as backend:
            yield backend


def test_a_fork_and_a_roll_back():
    with ForkdSandbox.create(TAG) as backend:
        backend.upload_files([("/tmp/kept", b"one")])
        backend.checkpoint("before")
        (copy,) = backend.fork()
        copy.execute("echo copy > /tmp/kept")
        backend.execute("rm /tmp/kept")
        assert backend.download_files(["/tmp/kept"])[0].error == "file_not_found"
        backend.rollback("before")
        assert backend.download_files(["/tmp/kept"])[0].content == b"one"
        assert copy.execute("cat /tmp/kept").output == "copy\n"
        copy.close()


def test_an_agent_uses_the_backend():
    from deepagents import create_deep_agent
    from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
    from langchain_core.messages import AIMessage

    class Scripted(FakeMessagesListChatModel):
        def bind_tools(self, tools, **_):
            return self

    call = {"name": "execute", "args": {"command": "echo $((6 * 7)) > /tmp/answer; cat /tmp/answer"}, "id": "1"}
    model = Scripted(responses=[AIMessage(content="", tool_calls=[call]), AIMessage(content="done")])
    with ForkdSandbox.create(TAG) as backend:
        agent = create_deep_agent(model=model, backend=backend)
        done = agent.invoke({"messages": [{"role": "user", "content": "go"}]})
        assert "42" in next(message.content for message in done["messages"] if message.type == "tool")
        assert backend.download_files(["/tmp/answer"])[0].content == b"42\n"
