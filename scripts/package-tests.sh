#!/usr/bin/env bash
# Builds the packages from finished programs and installs them without a network, each into an empty folder. `make test`
# runs it. The Debian package is installed for real in the soak of the units.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

work=$(mktemp -d)
at_end 'rm -rf "$work"'
use_node
version=$("$bin/forkd" --version)

package() { SOURCE_DATE_EPOCH=1700000000 python3 packaging/tools/package.py "$bin" "$1" >/dev/null; }
# `same_version NAME PROGRAM`
same_version() {
    local found
    found=$("$2" --version) || die "forkd of the $1 does not run"
    [ "$found" = "$version" ] || die "forkd of the $1 says '$found', and the one that was built '$version'"
    say "    $1: $found"
}
# A daemon that finds the other programs gets as far as its data folder.
finds_the_others() {
    local out
    out=$("$2" serve --data-dir /proc/none 2>&1) && die "forkd-controller of the $1 served /proc/none"
    if grep -qE 'forkd-(vmm|spawn|agent|image|net)' <<<"$out"; then die "forkd-controller of the $1: $out"; fi
}

equal_bytes() {
    package "$work/one" && package "$work/two"
    cmp "$work/one/SHA256SUMS" "$work/two/SHA256SUMS" || die "two builds of the packages differ"
    (cd "$work/one" && sha256sum --quiet -c SHA256SUMS)
}
in_python() {
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install -q --disable-pip-version-check --no-index "$work"/one/*.whl
    same_version wheel "$work/venv/bin/forkd"
    finds_the_others wheel "$work/venv/bin/forkd-controller"
    "$work/venv/bin/pip" uninstall -q -y forkd-runtime
    if compgen -G "$work/venv/bin/forkd*" >/dev/null; then die "the wheel leaves programs behind"; fi
}
in_node() {
    mkdir "$work/node"
    (cd "$work/node" && npm install --offline --no-audit --no-fund --loglevel=error "$work"/one/*.tgz >/dev/null)
    same_version "npm packages" "$work/node/node_modules/.bin/forkd"
    finds_the_others "npm packages" "$work/node/node_modules/.bin/forkd-controller"
    rm -r "$work/node/node_modules/@forkd"
    local out
    out=$("$work/node/node_modules/.bin/forkd" --version 2>&1) && die "the launcher runs a program that is not there"
    grep -q 'there are no programs' <<<"$out" || die "the launcher does not say that programs are missing: $out"
}
from_debian() {
    local script
    dpkg-deb -x "$work"/one/*.deb "$work/deb"
    dpkg-deb -e "$work"/one/*.deb "$work/deb/DEBIAN"
    for script in postinst prerm postrm; do sh -n "$work/deb/DEBIAN/$script"; done
    same_version "Debian package" "$work/deb/usr/bin/forkd"
    finds_the_others "Debian package" "$work/deb/usr/bin/forkd-controller"
    grep -q '^ExecStart=/usr/bin/forkd-controller serve' "$work/deb/usr/lib/systemd/system/forkd-controller.service" || die "the unit of the Debian package names another program"
}
bill() {
    python3 - "$work"/one/*.cdx.json <<'PY'
import json, sys
bill = json.load(open(sys.argv[1]))
names = {one["name"] for one in bill["components"]}
assert {"tokio", "axum", "rustix"} <= names, "the bill of materials lacks crates that the programs have"
assert "proptest" not in names, "the bill of materials names crates of tests"
PY
}

equal_bytes
in_python
in_node
from_debian
bill
