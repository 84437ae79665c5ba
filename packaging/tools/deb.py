"""The Debian package: programs, units, manual pages, and with `--image` kernel and first image.

The programs are together in /usr/lib/forkd, since they find each other there; /usr/bin has links to those that people
call. Kernel and image are below /usr/share/forkd. Its script `postinst` puts them into the daemon's data folder.
"""

import os
import shutil
import subprocess
from pathlib import Path

from content import ROOT, Content, PackageError, glibc, run

CALLED = ["forkd", "forkd-controller", "forkd-image"]
SCRIPTS = ["postinst", "prerm", "postrm"]

CONTROL = """\
Package: forkd
Version: {version}
Architecture: amd64
Maintainer: the forkd developers <forkd@localhost>
Section: admin
Priority: optional
Installed-Size: {kib}
Depends: libc6 (>= {glibc}), systemd
Recommends: ca-certificates
Suggests: qemu-system-x86
Description: sandboxes that start copy-on-write from a warm parent
 A parent microVM boots once, warms up and is frozen. Children start from it
 copy-on-write, each a Linux guest behind its own KVM boundary. A running
 sandbox can be branched, rolled back and forked.
 .
 The package has the daemon with its units and the command line.
"""

COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: forkd

Files: *
Copyright: the forkd developers
License: Apache-2.0
 On Debian systems, the text of the Apache License version 2.0 is in
 /usr/share/common-licenses/Apache-2.0.
"""


def build(content: Content, state: Path | None, stage: Path, out: Path) -> Path:
    """Writes the package. `state` is a data folder that `forkd-image install` has filled."""
    lay_out_programs(content, stage)
    lay_out_units(stage)
    lay_out_documents(content, stage)
    if state is not None:
        lay_out_image(state, stage / "usr/share/forkd")
    control(content, stage)
    for folder, _, files in os.walk(stage):
        for path in [Path(folder), *(Path(folder) / name for name in files)]:
            os.utime(path, (content.epoch, content.epoch), follow_symlinks=False)
    package = out / f"forkd_{content.version}_amd64.deb"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(content.epoch)}
    run("dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", stage, package, env=environment)
    return package


def put(source: Path, target: Path, mode: int = 0o644) -> None:
    """Copies a file and makes the folders it needs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def write(text: str, target: Path, mode: int = 0o644) -> None:
    """Writes a file and makes the folders it needs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    target.chmod(mode)


def lay_out_programs(content: Content, stage: Path) -> None:
    for path in content.programs:
        put(path, stage / "usr/lib/forkd" / path.name, 0o755)
    links = stage / "usr/bin"
    links.mkdir(parents=True)
    for name in CALLED:
        (links / name).symlink_to(f"../lib/forkd/{name}")


def lay_out_units(stage: Path) -> None:
    source = ROOT / "packaging/systemd"
    put(source / "forkd.socket", stage / "usr/lib/systemd/system/forkd.socket")
    put(source / "forkd.sysusers", stage / "usr/lib/sysusers.d/forkd.conf")
    unit = (source / "forkd-controller.service").read_text()
    if "/usr/local/bin/" not in unit:
        raise PackageError("forkd-controller.service no longer names /usr/local/bin: change deb.py with it")
    unit = unit.replace("/usr/local/bin/", "/usr/bin/")
    write(unit, stage / "usr/lib/systemd/system/forkd-controller.service")


def lay_out_documents(content: Content, stage: Path) -> None:
    forkd = next(path for path in content.programs if path.name == "forkd")
    manual = stage / "usr/share/man/man1"
    manual.mkdir(parents=True)
    run(forkd, "man", "--out", manual)
    for page in sorted(manual.iterdir()):
        # Without the name and the time in its header, equal pages give equal files.
        run("gzip", "-9", "-n", page)
    completions = {
        "bash": "usr/share/bash-completion/completions/forkd",
        "fish": "usr/share/fish/vendor_completions.d/forkd.fish",
        "zsh": "usr/share/zsh/vendor-completions/_forkd",
    }
    for shell, path in completions.items():
        write(run(forkd, "completions", shell), stage / path)
    documents = stage / "usr/share/doc/forkd"
    write(COPYRIGHT, documents / "copyright")
    put(ROOT / "CHANGELOG.md", documents / "CHANGELOG.md")
    put(ROOT / "SECURITY.md", documents / "SECURITY.md")


def lay_out_image(state: Path, share: Path) -> None:
    for path in sorted((state / "kernels").iterdir()):
        put(path, share / "kernels" / path.name)
    for folder in sorted((state / "images").iterdir()):
        put(folder / "image.json", share / "images" / folder.name / "image.json")
        # dpkg would write every hole of the disk.
        packed = share / "images" / folder.name / "root.ext4.xz"
        with packed.open("wb") as target:
            subprocess.run(["xz", "-1", "-T2", "--stdout", folder / "root.ext4"], stdout=target, check=True)
        packed.chmod(0o644)


def control(content: Content, stage: Path) -> None:
    inside = stage / "DEBIAN"
    size = sum(path.stat().st_size for path in stage.rglob("*") if path.is_file() and not path.is_symlink())
    major, minor = glibc(content.programs)
    write(
        CONTROL.format(version=content.version, kib=size // 1024, glibc=f"{major}.{minor}"),
        inside / "control",
    )
    for name in SCRIPTS:
        put(ROOT / "packaging/deb" / name, inside / name, 0o755)
