#!/usr/bin/env bash
# Unpacks tools of Debian 13 that tests compare forkd with into the cache: a registry, a tool that copies artifacts, and
# another unpacker of images.
# Nothing is installed, so no service starts.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tools=(docker-registry oras umoci)

ready() {
    local tool
    for tool in "${tools[@]}"; do [ -x "$cache/tools/usr/bin/$tool" ] || return 1; done
}

mkdir -p "$cache"
exec 8>"$cache/tools.lock"
flock 8
if ready; then exit 0; fi

staging=$(mktemp -d "$cache/tools.new.XXXXXX")
at_end 'rm -rf "$staging"'
say "    unpacking ${tools[*]} from Debian 13 into $cache/tools (about 40 MB)"
# Without a given mirror, mmdebstrap uses its default mirror and checks it with Debian's keys.
run mmdebstrap --quiet --variant=extract --aptopt='APT::Install-Recommends "false"' \
    --include="$(IFS=, && printf '%s' "${tools[*]}")" trixie "$staging/root"
mkdir -p "$staging/usr/bin"
for tool in "${tools[@]}"; do
    mv "$staging/root/usr/bin/$tool" "$staging/usr/bin/"
    "$staging/usr/bin/$tool" --help >/dev/null || die "the unpacked $tool does not start"
done
rm -rf "$staging/root" "$cache/tools"
chmod 755 "$staging"
mv "$staging" "$cache/tools"
