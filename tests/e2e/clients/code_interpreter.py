#!/usr/bin/env python3
"""E2B's own SDK of the code interpreter, against ten children of the recipe code-interpreter.

    code_interpreter.py FORKD URL IMAGE

The daemon serves the E2B protocol and has the image IMAGE. The last line counts cases.
"""

import base64
import os
import subprocess
import sys
import traceback

FORKD, URL, IMAGE = sys.argv[1:]
TAG = f"interpreter-{IMAGE}"
CHILDREN = 10
# Seconds for one execution on an emulated processor.
PATIENCE = 600
os.environ.update(E2B_API_KEY="e2b_" + "0" * 40, E2B_API_URL=URL, E2B_SANDBOX_URL=URL)

from e2b_code_interpreter import Sandbox  # noqa: E402

PLOT = """
import pandas as pd
frame = pd.DataFrame({"x": [1, 2, 3], "y": [2, 4, 8]})
frame.plot(x="x", y="y")
"""


def check(box, number):
    """The parent's modules are loaded, a value of this child is its own, and a figure arrives as a PNG."""
    loaded = box.run_code("import sys; 'pandas' in sys.modules and 'mine' not in globals()", timeout=PATIENCE)
    assert loaded.text == "True", loaded
    own = box.run_code(f"mine = {number} * 7; print('printed'); mine", timeout=PATIENCE)
    assert own.text == str(number * 7), own
    assert "".join(own.logs.stdout) == "printed\n", own
    figure = box.run_code(PLOT, timeout=PATIENCE)
    pictures = [base64.b64decode(result.png) for result in figure.results if result.png]
    assert pictures and pictures[0].startswith(b"\x89PNG"), figure
    raised = box.run_code("1 / 0", timeout=PATIENCE)
    assert raised.error and raised.error.name == "ZeroDivisionError", raised
    return pictures[0]


def main():
    passed = failed = 0
    subprocess.run([FORKD, "rmi", "--force", TAG], capture_output=True, check=False)
    subprocess.run([FORKD, "snapshot", "--tag", TAG, "--image", IMAGE, "--ready-timeout-secs", "3600"], check=True)
    for number in range(CHILDREN):
        try:
            box = Sandbox.create(template=TAG, timeout=3600, request_timeout=PATIENCE)
            try:
                picture = check(box, number)
            finally:
                box.kill()
        except Exception:
            failed += 1
            print(f"FAIL child {number}")
            traceback.print_exc(file=sys.stdout)
        else:
            passed += 1
            print(f"ok   child {number}: a figure of {len(picture)} bytes", flush=True)
    subprocess.run([FORKD, "rmi", "--force", TAG], check=True)
    print(f"{passed} passed, {failed} failed")


main()
