"""The wheel `forkd-runtime`: the programs, for `pip install`.

All programs are scripts of the wheel. They find each other in the folder that they are in.
"""

import base64
import hashlib
import time
import zipfile
from pathlib import Path

from content import SUMMARY, Content, glibc

METADATA = """\
Metadata-Version: 2.4
Name: forkd-runtime
Version: {version}
Summary: The programs of forkd: {summary}
License-Expression: Apache-2.0
Requires-Python: >=3.11
Description-Content-Type: text/markdown

The programs of forkd. `forkd doctor` checks the host, `forkd --help` lists the commands.
The client library is `forkd-sdk`.
"""

WHEEL = """\
Wheel-Version: 1.0
Generator: forkd
Root-Is-Purelib: false
Tag: {tag}
"""


def build(content: Content, out: Path) -> Path:
    """Writes the wheel and returns its path."""
    major, minor = glibc(content.programs)
    tag = f"py3-none-manylinux_{major}_{minor}_x86_64"
    name = f"forkd_runtime-{content.version}"
    info = f"{name}.dist-info"
    files = [(f"{name}.data/scripts/{path.name}", path.read_bytes(), 0o755) for path in content.programs]
    metadata = METADATA.format(version=content.version, summary=SUMMARY)
    files += [
        (f"{info}/METADATA", metadata.encode(), 0o644),
        (f"{info}/WHEEL", WHEEL.format(tag=tag).encode(), 0o644),
    ]
    record = "".join(f"{path},sha256={digest(data)},{len(data)}\n" for path, data, _ in files)
    files.append((f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode(), 0o644))
    wheel = out / f"{name}-{tag}.whl"
    # Archives of this kind know no time before 1980.
    stamp = time.gmtime(max(content.epoch, 315_532_800))[:6]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for path, data, mode in files:
            entry = zipfile.ZipInfo(path, stamp)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, data)
    return wheel


def digest(data: bytes) -> str:
    """The digest of a file, as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
