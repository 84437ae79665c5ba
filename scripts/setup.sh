#!/usr/bin/env bash
# `make setup`: installs missing packages. Prints nothing if nothing is missing.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source "$root/scripts/apt.sh"

# Requirements: a check, then the Debian and Ubuntu package that satisfies it.
#   cmd:NAME       a program in PATH
#   file:PATH      a file; a pattern is allowed
needs=(
    "cmd:gcc                                              gcc"
    "file:/usr/lib/*/libc.a                               libc6-dev"
    "cmd:make                                             make"
    "cmd:git                                              git"
    "cmd:flock                                            util-linux"
    "cmd:mmdebstrap                                       mmdebstrap"
    "cmd:mke2fs                                           e2fsprogs"
    "cmd:cpio                                             cpio"
    "cmd:xz                                               xz-utils"
    "cmd:zstd                                             zstd"
    "file:/usr/share/keyrings/debian-archive-keyring.gpg  debian-archive-keyring"
    "file:/etc/ssl/certs/ca-certificates.crt              ca-certificates"
    "cmd:python3                                          python3"
    "cmd:strace                                           strace"
    "cmd:ip                                               iproute2"
    "file:/usr/lib/python3*/ensurepip/__init__.py         python3-venv"
)

# Older versions corrupt SMP guests that use nested virtualisation.
qemu_minimum=10

os_release=${FORKD_OS_RELEASE:-/etc/os-release}

read_os() {
    os_id= os_version= os_codename= os_name=
    if [ -r "$os_release" ]; then
        # shellcheck disable=SC1090
        IFS='|' read -r os_id os_version os_codename os_name < <(
            unset ID VERSION_ID VERSION_CODENAME PRETTY_NAME
            . "$os_release"
            printf '%s|%s|%s|%s\n' "${ID:-}" "${VERSION_ID:-}" "${VERSION_CODENAME:-}" "${PRETTY_NAME:-}"
        )
    fi
    case "$os_id $os_version" in
        "debian 12" | "debian 13" | "ubuntu 24.04") os_supported=1 ;;
        *) os_supported= ;;
    esac
}

satisfied() {
    case $1 in
        cmd:*) have "${1#cmd:}" ;;
        file:*) compgen -G "${1#file:}" >/dev/null ;;
    esac
}

qemu_major() {
    local line
    line=$(qemu-system-x86_64 --version 2>/dev/null | head -n 1) || return 1
    [[ $line =~ version\ ([0-9]+)\. ]] && printf '%s' "${BASH_REMATCH[1]}"
}

# The QEMU for `forkd machine`: the system's, or the one in the cache if the system's is too old.
qemu_ready() {
    [ -x "$cache/qemu/bin/qemu-system-x86_64" ] && return 0
    have qemu-system-x86_64 || return 1
    [ "$(qemu_major || printf 0)" -ge "$qemu_minimum" ]
}

wanted_rust() { sed -n 's/^channel *= *"\(.*\)"/\1/p' rust-toolchain.toml; }

# rustup follows rust-toolchain.toml. Another compiler must be at least as new.
rust_ready() {
    have cargo && have rustc || return 1
    local version
    version=$(rustc --version 2>/dev/null) || return 1
    version=${version#rustc }
    version=${version%% *}
    [ "$(printf '%s\n%s\n' "$(wanted_rust)" "${version%%-*}" | sort -V | head -n 1)" = "$(wanted_rust)" ]
}

# Fills `missing` (names for users) and `packages` (names for apt).
look() {
    missing=() packages=() qemu_missing= rust_missing=
    local row check package python
    python=$(command -v python3 || true)
    for row in "${needs[@]}"; do
        read -r check package <<<"$row"
        # A Python that is not the distribution's has its own venv.
        if [ "$package" = python3-venv ] && [[ $python == ?* && $python != /usr/bin/python3 ]]; then continue; fi
        if ! satisfied "$check"; then
            case $check in cmd:*) missing+=("${check#cmd:}") ;; *) missing+=("$package") ;; esac
            packages+=("$package")
        fi
    done
    if ! qemu_ready; then
        qemu_missing=1
        missing+=("qemu-system-x86_64 $qemu_minimum or newer")
    fi
    if ! rust_ready; then
        rust_missing=1
        missing+=("rustc and cargo $(wanted_rust)")
    fi
    [ ${#missing[@]} -eq 0 ]
}

missing_text() {
    local IFS=,
    local text="${missing[*]}"
    printf '%s' "${text//,/, }"
}

candidate() {
    LC_ALL=C apt-cache -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$sources" policy "$1" 2>/dev/null |
        sed -n 's/^  Candidate: \(.*\)/\1/p' | grep -v '(none)'
}

install_packages() { apt_with "$sources" install --no-install-recommends "$@"; }

install_qemu() {
    local version
    version=$(candidate qemu-system-x86 || true)
    version=${version#*:}
    if [ "${version%%.*}" -ge "$qemu_minimum" ] 2>/dev/null; then
        install_packages qemu-system-x86
    elif [ "$os_id" = debian ]; then
        install_packages -t "$os_codename-backports" qemu-system-x86
    else
        "$root/scripts/unpack-qemu.sh"
    fi
}

install_rust() {
    if have rustup; then
        rustup toolchain install "$(wanted_rust)" --profile minimal --component rustfmt --component clippy && return 0
        die "the Rust toolchain $(wanted_rust) is missing and rustup could not install it"
    fi
    if have cargo; then
        die "this project needs Rust $(wanted_rust) or newer; found $(rustc --version 2>/dev/null || printf 'no rustc')" \
            "remove the old one, or install rustup and run make setup again"
    fi
    # Debian's security suite has the compiler that the browsers are built with, under another package name.
    local pair version
    for pair in "rustc-web cargo-web" "rustc cargo"; do
        version=$(candidate "${pair%% *}" || true)
        version=${version%%[+-]*}
        [ -n "$version" ] || continue
        if [ "$(printf '%s\n%s\n' "$(wanted_rust)" "$version" | sort -V | head -n 1)" = "$(wanted_rust)" ]; then
            # shellcheck disable=SC2086
            install_packages $pair
            return
        fi
    done
    if [ -n "$(candidate rustup || true)" ]; then
        install_packages rustup
        rustup toolchain install "$(wanted_rust)" --profile minimal --component rustfmt --component clippy
        return
    fi
    die "rustc and cargo $(wanted_rust) are missing, and no package of this system brings them" \
        "install rustup (see rustup's own page), open a new shell, run make setup again"
}

install_missing() {
    sources=$(mktemp -d)
    at_end 'rm -rf "$sources"'
    if [ -n "$qemu_missing" ] && [ "$os_id $os_version" = "debian 12" ]; then
        apt_add_backports "$os_id" "$os_codename" || die "no Debian archive is configured in $apt_root"
    fi
    apt_own_sources "$os_id" "$os_codename" "$sources" || die "no archive of $os_name is configured in $apt_root"
    run apt_with "$sources" update
    if [ ${#packages[@]} -gt 0 ]; then run install_packages "${packages[@]}"; fi
    if [ -n "$qemu_missing" ]; then run install_qemu; fi
    if [ -n "$rust_missing" ]; then run install_rust; fi
}

main() {
    if look; then return 0; fi
    read_os
    if [ -z "$os_supported" ]; then
        die "missing: $(missing_text)" \
            "set-up installs packages on Debian 12, Debian 13 and Ubuntu 24.04 only; this is ${os_name:-an unknown system}"
    fi
    if [ "$(id -u)" -ne 0 ]; then
        die "missing: $(missing_text)" "run 'sudo make setup' once: installing packages needs root"
    fi
    # Two runs may arrive here at the same time. The second one finds nothing to do.
    local lock=${FORKD_SETUP_LOCK:-/run/lock/forkd-setup.lock}
    exec 9>"$lock"
    if ! flock -n 9; then
        say "    waiting for another set-up on this machine"
        flock 9
    fi
    if look; then return 0; fi
    say "    missing: $(missing_text)"
    install_missing
    look || die "still missing after installation: $(missing_text)"
}

# The tests of these functions source this file with FORKD_SETUP_LIB=1.
if [ -z "${FORKD_SETUP_LIB:-}" ]; then main "$@"; fi
