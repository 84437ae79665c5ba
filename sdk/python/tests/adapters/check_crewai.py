"""The tools of CrewAI, called as an agent calls them."""

import os

from forkd_sdk.integrations.crewai import ForkdTools

TAG = os.environ["FORKD_TEST_TAG"]


def test_tools_a_fork_and_a_roll_back():
    with ForkdTools(TAG) as tools:
        run, python, files = tools.all()
        assert run.run(command="echo hello; exit 2") == "hello\n\n[exit code 2]"
        assert "42" in python.run(code="6 * 7")
        assert "ZeroDivisionError" in python.run(code="1 / 0")
        assert "written" in files.run(action="write", path="/tmp/a", content="one")
        tools.checkpoint("before")
        (copy,) = tools.fork()
        files.run(action="write", path="/tmp/a", content="two")
        tools.rollback("before")
        assert files.run(action="read", path="/tmp/a") == "one"
        assert copy.all()[2].run(action="read", path="/tmp/a") == "one"
        assert files.run(action="read", path="/none").startswith("error: ")
        assert "file 3 a" in files.run(action="list", path="/tmp")
        copy.close()
