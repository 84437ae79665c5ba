#!/usr/bin/env bash
# Runs the test of one framework adapter against a daemon: `adapter-tests.sh FRAMEWORK TAG`, where TAG is a snapshot with
# Python. The daemon is the one that FORKD_URL names. The framework is installed into a Python environment in the cache.
# Not part of `make test`: frameworks are large.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ $# -ne 2 ]; then die "usage: adapter-tests.sh autogen|crewai|deepagents|inspect_ai|pydantic_ai|swarm TAG"; fi
case $1 in
    autogen) packages=(autogen-core==0.7.5 autogen-agentchat==0.7.5) ;;
    crewai) packages=(crewai==1.15.30) ;;
    deepagents) packages=(deepagents==0.7.32 langchain-tests==1.1.9) ;;
    inspect_ai) packages=(inspect-ai==0.3.285) ;;
    pydantic_ai) packages=(pydantic-ai-slim==2.66.0) ;;
    swarm) packages=(openai-swarm==0.1.1) ;;
    *) die "there is no adapter $1" ;;
esac
python=$(clients_python "${python_sdk[@]}" pytest==9.1.1 anyio "${packages[@]}")
cd "$root/sdk/python/tests/adapters"
PYTHONPATH=$root/sdk/python/src FORKD_TEST_TAG=$2 "$python" -m pytest -q --rootdir=. -p no:cacheprovider \
    -o python_files='check_*.py' -o asyncio_mode= "check_$1.py"
