# shellcheck shell=bash
# Sourced after lib.sh: provides a daemon with kernel and image, on this host or in a machine.

daemon_answers() { "$bin/forkd" ls </dev/null >/dev/null 2>&1; }

# In a session of its own: the daemon outlives this script.
start_daemon() {
    local log=$cache/controller.log tenths=300
    mkdir -p "$cache"
    # A demonstration on the user's own computer: sandboxes reach public addresses.
    setsid "$bin/forkd-controller" serve --network-default public </dev/null >"$log" 2>&1 &
    local pid=$!
    until daemon_answers; do
        kill -0 "$pid" 2>/dev/null || die "the daemon ended at once" "its log is $log"
        ((tenths-- > 0)) || die "the daemon does not answer" "its log is $log"
        sleep 0.1
    done
    say "    a daemon runs as process $pid; its log is $log"
}

# The daemon in the machine cannot reach a Debian mirror. It gets kernel and image from the host's cache.
provide_image() {
    local kernel image stamp inside=/var/lib/forkd
    kernel=$("$bin/forkd-image" kernel)
    initramfs=$("$bin/forkd-image" initramfs)
    image=$(dirname "$("$bin/forkd-image" build python-numpy)")
    # A path in the cache identifies its content.
    stamp=$inside/kernels/$(printf '%s\n' "$kernel" "$initramfs" "$image" | sha256sum | cut -c1-16)
    if in_machine test -e "$stamp"; then return 0; fi
    in_machine mkdir -p "$inside/kernels" "$inside/images/python-numpy"
    copy_in "$kernel/vmlinux" "$inside/kernels/vmlinux"
    copy_in "$initramfs" "$inside/kernels/initramfs.cpio"
    copy_in "$image/root.ext4" "$inside/images/python-numpy/root.ext4"
    copy_in "$image/image.json" "$inside/images/python-numpy/image.json"
    in_machine touch "$stamp"
}

in_machine() { "$bin/forkd" machine exec --no-sync -- "$@" </dev/null; }
copy_in() { "$bin/forkd" machine cp "$1" ":$2" </dev/null; }

# Options of the machine's start. A script that sets them always gets a machine.
machine_options=()

# Machine and daemon outlive this script.
need_daemon() {
    local kvm
    kvm=$(probe_kvm)
    if [ "$kvm" != native ] || [ ${#machine_options[@]} -gt 0 ]; then
        say "    /dev/kvm is $kvm: guests run in a machine"
        step "machine" "$bin/forkd" machine start "${machine_options[@]}"
        say "    the machine stays; \`forkd machine stop\` ends it"
        step "kernel and image" provide_image
    elif ! daemon_answers; then
        say "==> daemon"
        start_daemon
    fi
}
