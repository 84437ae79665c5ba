"""The npm packages: the programs as `@forkd/linux-x64`, and the launcher `forkd-runtime` that depends on it.

npm installs an optional dependency only where its `os` and `cpu` fit. The launcher then finds the programs or says why
there are none.
"""

import json
import shutil
from pathlib import Path

from content import ROOT, SUMMARY, Content, run

PROGRAMS = "@forkd/linux-x64"


def build(content: Content, stage: Path, out: Path) -> list[Path]:
    """Writes both packages and returns their paths."""
    programs = {
        "name": PROGRAMS,
        "description": f"The programs of forkd for Linux on x86_64: {SUMMARY}",
        "os": ["linux"],
        "cpu": ["x64"],
        "libc": ["glibc"],
        "files": ["bin"],
    }
    launcher = {
        "name": "forkd-runtime",
        "description": f"The forkd command: {SUMMARY}",
        "bin": {"forkd": "forkd.js", "forkd-controller": "forkd.js"},
        "files": ["forkd.js"],
        "optionalDependencies": {PROGRAMS: content.version},
    }
    inside = stage / "programs" / "bin"
    inside.mkdir(parents=True)
    for path in content.programs:
        shutil.copy(path, inside / path.name)
        (inside / path.name).chmod(0o755)
    (stage / "launcher").mkdir()
    shutil.copy(ROOT / "packaging/npm/forkd.js", stage / "launcher/forkd.js")
    (stage / "launcher/forkd.js").chmod(0o755)
    return [
        pack(stage / "programs", programs, content.version, out),
        pack(stage / "launcher", launcher, content.version, out),
    ]


def pack(folder: Path, package: dict, version: str, out: Path) -> Path:
    """Lets npm write the package."""
    package = {"version": version, "license": "Apache-2.0", "engines": {"node": ">=20"}, **package}
    (folder / "package.json").write_text(json.dumps(package, indent=2) + "\n")
    made = json.loads(run("npm", "pack", "--json", "--ignore-scripts", "--pack-destination", out, folder))
    return out / made[0]["filename"].replace("@", "").replace("/", "-")
