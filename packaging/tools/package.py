"""Builds the packages of forkd from finished programs: `package.py PROGRAMS OUT`.

Equal programs and an equal SOURCE_DATE_EPOCH give equal files. OUT/SHA256SUMS lists all
files. Needs Python, dpkg-deb, objdump and npm, and no network.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True

import content  # noqa: E402
import deb  # noqa: E402
import npm  # noqa: E402
import sbom  # noqa: E402
import wheel  # noqa: E402

KINDS = ["wheel", "npm", "deb", "sbom"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the packages of forkd from finished programs.")
    parser.add_argument("programs", type=Path, help="the folder with the programs, such as target/release")
    parser.add_argument("out", type=Path, help="the folder for the packages")
    parser.add_argument("--only", action="append", choices=KINDS, help="a package to build [default: all]")
    parser.add_argument("--state", type=Path, help="a data folder filled by `forkd-image install`, for the Debian package")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        made = build(args, content.read(args.programs.resolve()))
    except content.PackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(path)
    sums = [f"{sha256(path)}  {path.name}\n" for path in sorted(made)]
    (args.out / "SHA256SUMS").write_text("".join(sums))
    return 0


def build(args: argparse.Namespace, found: content.Content) -> list[Path]:
    """Builds what was asked for. Nothing of a failed run stays outside `out`."""
    out = args.out.resolve()
    made: list[Path] = []
    for kind in args.only or KINDS:
        print(f"    {kind}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="forkd-package-") as stage:
            Path(stage).chmod(0o755)
            if kind == "wheel":
                made.append(wheel.build(found, out))
            elif kind == "npm":
                made += npm.build(found, Path(stage), out)
            elif kind == "deb":
                made.append(deb.build(found, args.state, Path(stage), out))
            else:
                made.append(sbom.build(found, records(args.state), out))
    return made


def records(state: Path | None) -> list[Path]:
    """The records of the images in a data folder."""
    return sorted(state.glob("images/*/image.json")) if state else []


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
