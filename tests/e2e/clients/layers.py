"""Layers of container images for tests."""

import io
import tarfile


def layer(*entries):
    """A plain archive of (name, bytes, mode), (name, None) for a folder and (name, text) for a symbolic link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content, *mode in entries:
            info = tarfile.TarInfo(name)
            info.mode = mode[0] if mode else 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return out.getvalue()
