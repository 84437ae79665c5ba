#!/usr/bin/env python3
"""Makes the templates of E2B's suites from a snapshot, with E2B's own SDK.

    prepare.py URL TAG WHEEL…

TAG is a snapshot of the image in this folder. The packages of the WHEELs become part of the template
`code-interpreter-v1`, which is `base` with a Python and a JavaScript context that have run.
"""

import io
import os
import sys
import zipfile

URL, TAG, *WHEELS = sys.argv[1:]
os.environ.update(E2B_API_KEY="e2b_" + "0" * 40, E2B_API_URL=URL, E2B_SANDBOX_URL=URL)

from e2b_code_interpreter import Sandbox  # noqa: E402

PACKAGES = "/usr/lib/python3/dist-packages"
USER = """
id user >/dev/null 2>&1 || useradd --create-home --uid 1000 --shell /bin/bash user
echo 'user ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/user
"""
WARM = """
import numpy, pandas, matplotlib.pyplot as plt
from PIL import Image
plt.plot([1, 2])
plt.show()
del numpy, pandas, plt, Image
"""


def base():
    with Sandbox.create(TAG, timeout=1800) as box:
        box.commands.run(USER, user="root", timeout=300)
        box.create_snapshot(name="base", request_timeout=300)


def interpreter():
    with Sandbox.create("base", timeout=1800) as box:
        for wheel in WHEELS:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if not name.endswith("/"):
                        content = io.BytesIO(archive.read(name))
                        box.files.write(f"{PACKAGES}/{name}", content, user="root")
        for code, language in [(WARM, "python"), ("1", "javascript")]:
            ran = box.run_code(code, language=language, timeout=600, request_timeout=600)
            if ran.error:
                sys.exit(f"{language}: {ran.error.name}: {ran.error.value}")
        box.create_snapshot(name="code-interpreter-v1", request_timeout=300)


base()
interpreter()
