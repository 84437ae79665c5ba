#!/usr/bin/python3
"""Runs code in the kernel of this guest and prints its output: kernel CODE"""

import sys

from jupyter_client import BlockingKernelClient

SECONDS = 300

client = BlockingKernelClient(connection_file="/etc/jupyter/kernel.json")
client.load_connection_file()
client.start_channels()
client.wait_for_ready(timeout=SECONDS)


def show(message):
    content = message["content"]
    if message["msg_type"] == "stream":
        stream = sys.stdout if content["name"] == "stdout" else sys.stderr
        stream.write(content["text"])
        stream.flush()
    elif message["msg_type"] == "error":
        print(*content["traceback"], sep="\n", file=sys.stderr)


reply = client.execute_interactive(sys.argv[1], timeout=SECONDS, output_hook=show)
client.stop_channels()
sys.exit(0 if reply["content"]["status"] == "ok" else 1)
