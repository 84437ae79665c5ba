"""Swarm: functions for agents that share a sandbox, and a handoff that forks it.

    sandbox = Sandbox.create("py")
    coder = Agent(name="coder", functions=[run_command, handoff(reviewer)])
    Swarm().run(coder, messages, context_variables={"sandbox": sandbox.id})

The context variable `sandbox` names the sandbox of the agent that speaks. After a handoff it names a fork, so the next
agent begins with the same files and processes and cannot disturb the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarm import Agent
from swarm.types import Result

from forkd_sdk import ApiError, Client, CommandTimeout, Sandbox

_client: Client | None = None


def _sandbox(context_variables: dict[str, Any]) -> Sandbox:
    global _client
    _client = _client or Client()
    return Sandbox.connect(str(context_variables["sandbox"]), client=_client)


def run_command(context_variables: dict[str, Any], command: str) -> str:
    """Run a shell command in the sandbox and return its output and exit code."""
    try:
        result = _sandbox(context_variables).commands.run(command)
    except (CommandTimeout, ApiError) as error:
        return f"error: {error}"
    return f"{result.stdout}{result.stderr}[exit code {result.exit_code}]"


def run_python(context_variables: dict[str, Any], code: str) -> str:
    """Run Python code in the warm interpreter of the sandbox; variables stay for the next call."""
    try:
        done = _sandbox(context_variables).run_code(code)
    except ApiError as error:
        return f"error: {error}"
    return "\n".join(str(part) for part in (done.stdout, done.text, done.error) if part)


def handoff(agent: Agent) -> Callable[[dict[str, Any]], Result]:
    """A function with which an agent hands over to another one, which gets a fork of the sandbox."""

    def transfer(context_variables: dict[str, Any]) -> Result:
        (child,) = _sandbox(context_variables).fork()
        return Result(value=f"{agent.name} goes on in {child.id}", agent=agent, context_variables={"sandbox": child.id})

    transfer.__name__ = f"transfer_to_{agent.name.lower().replace(' ', '_')}"
    transfer.__doc__ = f"Hand over to {agent.name}, with a copy of the sandbox as it is now."
    return transfer
