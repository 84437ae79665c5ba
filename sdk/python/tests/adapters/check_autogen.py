"""The code executor of AutoGen, by itself and in an agent without a model."""

import asyncio
import os

from autogen_agentchat.agents import CodeExecutorAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock

from forkd_sdk.integrations.autogen import ForkdCodeExecutor

TAG = os.environ["FORKD_TEST_TAG"]


def run(executor, code, language="python"):
    return executor.execute_code_blocks([CodeBlock(code=code, language=language)], CancellationToken())


async def blocks():
    async with ForkdCodeExecutor(TAG) as executor:
        done = await run(executor, "print(6 * 7)")
        assert (done.exit_code, done.output) == (0, "42\n"), done
        assert (await run(executor, "echo kept > /tmp/x; exit 3", "sh")).exit_code == 3
        assert (await run(executor, "x", "cobol")).exit_code == 1
        (copy,) = await executor.fork()
        await executor.restart()
        assert (await run(executor, "cat /tmp/x", "sh")).exit_code != 0
        assert (await run(copy, "cat /tmp/x", "sh")).output == "kept\n"
        await copy.stop()
        again = ForkdCodeExecutor.load_component(executor.dump_component())
        assert again._to_config().tag == TAG
        token = CancellationToken()
        slow = asyncio.ensure_future(executor.execute_code_blocks([CodeBlock(code="sleep 600", language="sh")], token))
        await asyncio.sleep(1)
        token.cancel()
        try:
            await slow
            raise AssertionError("not cancelled")
        except asyncio.CancelledError:
            pass


async def agent():
    async with ForkdCodeExecutor(TAG) as executor:
        coder = CodeExecutorAgent("coder", code_executor=executor)
        message = TextMessage(content="```python\nprint(sum(range(10)))\n```", source="user")
        answer = await coder.on_messages([message], CancellationToken())
        assert "45" in answer.chat_message.content, answer


def test_blocks():
    asyncio.run(blocks())


def test_an_agent_runs_code():
    asyncio.run(agent())
