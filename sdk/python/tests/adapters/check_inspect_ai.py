"""The self-check of Inspect for sandbox environments, and an evaluation without a model."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from inspect_ai import Task, eval as run_eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, get_model
from inspect_ai.model._model_output import ModelUsage
from inspect_ai.scorer import includes
from inspect_ai.solver import basic_agent
from inspect_ai.tool import bash
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from forkd_sdk.integrations.inspect_ai import ForkdConfig, ForkdSandboxEnvironment

TAG = os.environ["FORKD_TEST_TAG"]
# The suite wants a user without privileges.
CONFIG = ForkdConfig(tag=TAG, user="tester", setup_user="root", setup="useradd -m tester")

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
async def shared():
    await ForkdSandboxEnvironment.task_init("check", CONFIG)
    made = await ForkdSandboxEnvironment.sample_init("check", CONFIG, {})
    yield made["default"]
    await ForkdSandboxEnvironment.sample_cleanup("check", CONFIG, made, False)
    await ForkdSandboxEnvironment.task_cleanup("check", CONFIG, True)


@pytest.fixture
def sandbox_env(shared):
    return shared


def test_an_evaluation_forks_a_warm_parent(tmp_path):
    def with_usage(output):
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return output

    outputs = [
        with_usage(ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "cat /warm"})),
        with_usage(ModelOutput.for_tool_call("mockllm/model", "submit", {"answer": "warm"})),
    ]
    task = Task(
        dataset=[Sample(input="what is in /warm?", target="warm")],
        solver=basic_agent(tools=[bash()]),
        scorer=includes(),
        sandbox=("forkd", ForkdConfig(tag=TAG, setup="echo warm > /warm")),
    )
    model = get_model("mockllm/model", custom_outputs=outputs)
    # The fixtures of this module have an event loop in this thread.
    with ThreadPoolExecutor() as threads:
        (log,) = threads.submit(run_eval, task, model=model, display="none", log_dir=str(tmp_path)).result()
    assert log.status == "success", log.error
    shown = [message.text for message in log.samples[0].messages if message.role == "tool"]
    assert "warm" in shown[0], shown
