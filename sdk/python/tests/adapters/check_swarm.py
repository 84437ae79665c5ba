"""Swarm with a scripted client: the second agent gets a fork of the sandbox."""

import json
import os
from types import SimpleNamespace

from openai.types.chat.chat_completion_message import ChatCompletionMessage
from swarm import Agent, Swarm

from forkd_sdk import Sandbox
from forkd_sdk.integrations.swarm import handoff, run_command

TAG = os.environ["FORKD_TEST_TAG"]


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return ChatCompletionMessage(role="assistant", tool_calls=[{"id": name, "type": "function", "function": function}])


def test_a_handoff_forks_the_sandbox():
    reviewer = Agent(name="reviewer", functions=[run_command])
    coder = Agent(name="coder", functions=[run_command, handoff(reviewer)])
    script = iter([
        call("run_command", command="echo mine > /tmp/x"),
        call("transfer_to_reviewer"),
        call("run_command", command="cat /tmp/x; echo changed > /tmp/x"),
        ChatCompletionMessage(role="assistant", content="done"),
    ])
    create = lambda **_: SimpleNamespace(choices=[SimpleNamespace(message=next(script))])  # noqa: E731
    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    with Sandbox.create(TAG) as sandbox:
        answer = Swarm(client=client).run(coder, [{"role": "user", "content": "go"}], context_variables={"sandbox": sandbox.id})
        fork = answer.context_variables["sandbox"]
        assert answer.agent.name == "reviewer" and fork != sandbox.id
        assert any("mine" in str(message.get("content")) for message in answer.messages if message["role"] == "tool")
        assert sandbox.files.read("/tmp/x") == "mine\n"
        with Sandbox.connect(fork) as copy:
            assert copy.files.read("/tmp/x") == "changed\n"
