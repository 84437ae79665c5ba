#!/usr/bin/env python3
"""Makes the template `base` of E2B's suites from a snapshot, with E2B's own SDK.

    prepare.py URL TAG

TAG is a snapshot of the image in this folder.
"""

import os
import sys

URL, TAG = sys.argv[1:]
os.environ.update(E2B_API_KEY="e2b_" + "0" * 40, E2B_API_URL=URL, E2B_SANDBOX_URL=URL)

from e2b import Sandbox  # noqa: E402

USER = """
id user >/dev/null 2>&1 || useradd --create-home --uid 1000 --shell /bin/bash user
echo 'user ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/user
"""

with Sandbox.create(TAG, timeout=1800) as box:
    box.commands.run(USER, user="root", timeout=300)
    box.create_snapshot(name="base", request_timeout=300)
