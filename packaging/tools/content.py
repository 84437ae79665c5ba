"""The content of the packages: the programs, their version, and the time that is written into archives."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUMMARY = "microVMs that start copy-on-write from a warm parent"
PLATFORM = "x86_64-unknown-linux-gnu"


class PackageError(Exception):
    """A package could not be built. The text names the remedy."""


@dataclass(frozen=True)
class Content:
    """The inputs of every package."""

    version: str
    epoch: int
    programs: list[Path]
    metadata: dict


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise PackageError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def read(folder: Path) -> Content:
    """Finds the programs in `folder`. The workspace says which there are."""
    # Crates of other platforms were never downloaded, and are no part of the packages.
    metadata = json.loads(run("cargo", "metadata", "--format-version", "1", "--locked", "--offline", "--filter-platform", PLATFORM))
    crates = (str(ROOT / "crates") + "/", str(ROOT / "bench") + "/")
    names = sorted(
        target["name"]
        for package in metadata["packages"]
        if package["manifest_path"].startswith(crates)
        for target in package["targets"]
        if "bin" in target["kind"]
    )
    programs = [folder / name for name in names]
    missing = [path.name for path in programs if not path.is_file()]
    if missing:
        raise PackageError(f"{', '.join(missing)} not found in {folder}. Run scripts/build.sh first.")
    version = next(one["version"] for one in metadata["packages"] if one["name"] == "forkd-cli")
    return Content(version, epoch(), programs, metadata)


def epoch() -> int:
    """SOURCE_DATE_EPOCH, or the time of the last commit, so that equal sources give equal packages."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is not None:
        return int(given)
    try:
        return int(run("git", "log", "-1", "--format=%ct"))
    except (PackageError, FileNotFoundError):
        return 1_700_000_000


def glibc(programs: list[Path]) -> tuple[int, int]:
    """The oldest glibc that has every symbol the programs need."""
    newest = (2, 17)
    for program in programs:
        for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", run("objdump", "-p", program)):
            newest = max(newest, (int(major), int(minor)))
    return newest
