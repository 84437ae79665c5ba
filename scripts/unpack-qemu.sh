#!/usr/bin/env bash
# Unpacks Debian 13's QEMU into the cache, for systems whose own QEMU is too old. Nothing is installed: a wrapper
# starts the program with its own libraries and firmware.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

mkdir -p "$cache"
exec 8>"$cache/qemu.lock"
flock 8
[ -x "$cache/qemu/bin/qemu-system-x86_64" ] && exit 0

staging=$(mktemp -d "$cache/qemu.new.XXXXXX")
at_end 'rm -rf "$staging"'
say "    unpacking QEMU from Debian 13 into $cache/qemu (about 170 MB)"
# Without a given mirror, mmdebstrap uses its default mirror and checks it with Debian's keys.
run mmdebstrap --quiet --variant=extract --aptopt='APT::Install-Recommends "false"' \
    --include=qemu-system-x86,seabios,ipxe-qemu trixie "$staging/root"

mkdir "$staging/bin"
cat >"$staging/bin/qemu-system-x86_64" <<'WRAPPER'
#!/bin/sh
top=$(dirname "$(dirname "$(readlink -f "$0")")")/root/usr
lib=$top/lib/x86_64-linux-gnu
# Modules of the system's QEMU belong to another build.
export QEMU_MODULE_DIR="$lib/qemu"
exec "$lib/ld-linux-x86-64.so.2" --library-path "$lib" "$top/bin/qemu-system-x86_64" \
    -L "$top/share/qemu" -L "$top/share/seabios" "$@"
WRAPPER
chmod 755 "$staging" "$staging/bin/qemu-system-x86_64"
"$staging/bin/qemu-system-x86_64" --version >/dev/null || die "the unpacked QEMU does not start"
rm -rf "$cache/qemu"
mv "$staging" "$cache/qemu"
