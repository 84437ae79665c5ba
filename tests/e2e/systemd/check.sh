#!/usr/bin/env bash
# The Debian package under a real systemd: installed, a socket that starts the daemon, restarts, kills, a hang, limits, updated,
# removed.
#
#     check.sh DIR
#
# Runs as root on a KVM host with cgroup v2. DIR has `root.ext4` (the image of recipe.toml beside this) and `forkd.deb`. The
# host in the image is a container that ends with this script. The last line counts cases.
set -uo pipefail
dir=$(realpath "$1")
root=$dir/root
group=/sys/fs/cgroup/forkd-systemd
passed=0 failed=0 leader=

end() {
    if [ -n "$leader" ]; then kill -9 "$leader"; fi
    wait 2>/dev/null
    sleep 1
    umount -R "$root" 2>/dev/null
    find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null
}
trap end EXIT

begin() {
    mkdir -p "$root" "$group"
    modprobe loop
    mount -o loop "$dir/root.ext4" "$root" || exit 1
    for one in cpu memory pids; do echo +$one >/sys/fs/cgroup/cgroup.subtree_control; done
    cp "$dir/forkd.deb" "$root/root/forkd.deb"
    mkdir -p "$root/etc/forkd"
    # An emulated processor needs its time.
    echo FORKD_READY_TIMEOUT=5m >"$root/etc/forkd/controller.env"
    # Its first process is alone in a group of its own, so that systemd has the top of a hierarchy.
    (
        exec unshare --mount --pid --uts --ipc --net --fork --kill-child -- sh -c '
            echo 0 >"$2/cgroup.procs"
            exec unshare --cgroup -- sh -c "$3" sh "$1"
        ' sh "$root" "$group" '
            cd "$1"
            mount -t proc proc proc && mount -t sysfs sysfs sys && mount -t cgroup2 cgroup2 sys/fs/cgroup
            mount --rbind /dev dev && mount -t tmpfs -o mode=755 tmpfs run && mount -t tmpfs tmpfs tmp
            ip link set lo up
            mount --make-rprivate / && mount --rbind . . && cd "$PWD" && pivot_root . mnt && umount -l mnt
            exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --unit=multi-user.target
        '
    ) >"$dir/console" 2>&1 </dev/null &
    local unshare=$!
    for _ in $(seq 600); do
        leader=$(pgrep -P "$unshare" | head -n 1)
        if [ -n "$leader" ] && inside systemctl is-system-running 2>/dev/null | grep -qE 'running|degraded'; then return; fi
        sleep 0.5
    done
    cat "$dir/console"
    echo "systemd did not start"
    exit 1
}

inside() { nsenter -t "$leader" -a env PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@" </dev/null; }
main_pid() { inside systemctl show -P MainPID forkd-controller.service; }

# `expect NAME PATTERN COMMAND…`: the command ends with 0 and says the pattern.
expect() {
    local name=$1 pattern=$2 out status=0
    shift 2
    out=$("$@" 2>&1) || status=$?
    if [ "$status" -eq 0 ] && grep -qE -- "$pattern" <<<"$out"; then
        passed=$((passed + 1))
        echo "ok   $name"
    else
        failed=$((failed + 1))
        printf 'FAIL %s\n     exit %s, wanted: %s\n' "$name" "$status" "$pattern"
        printf '%s\n' "$out" | tail -n 20 | sed 's/^/     | /'
    fi
}

# Waits until the unit has another main process than the one named, and that one answers.
other_than() {
    for _ in $(seq 240); do
        if [ "$(main_pid)" != "$1" ] && inside systemctl is-active -q forkd-controller.service; then return; fi
        sleep 0.5
    done
    echo "still process $1"
    return 1
}

no_complaints() { ! inside systemd-analyze verify /usr/lib/systemd/system/forkd.socket /usr/lib/systemd/system/forkd-controller.service 2>&1 | grep forkd; }
by_socket() {
    inside systemctl stop forkd-controller.service
    inside curl -sS --max-time 120 --unix-socket /run/forkd/forkd.sock http://localhost/healthz
}
killed() {
    local before
    before=$(main_pid)
    inside kill "-$1" "$before"
    other_than "$before"
}
restarted() {
    local before
    before=$(main_pid)
    inside systemctl restart forkd-controller.service
    other_than "$before"
}
reloaded() {
    local before
    before=$(main_pid)
    inside systemctl reload forkd-controller.service
    sleep 1
    [ "$(main_pid)" = "$before" ]
}
limited() {
    inside sh -c 'cat /sys/fs/cgroup/system.slice/forkd-controller.service/*/*/*/memory.max'
}
no_vm_left() { ! inside pgrep -x forkd-vmm; }

nothing_left() { ! inside sh -c 'ls -d /usr/lib/forkd /var/lib/forkd /etc/forkd /run/forkd /usr/share/forkd' 2>/dev/null | grep .; }

begin
expect "the package is installed" '' inside dpkg -i /root/forkd.deb
expect "systemd has no complaints about the units" '' no_complaints
expect "the units start with the host" 'enabled' inside systemctl is-enabled forkd.socket forkd-controller.service
expect "the daemon is active" '^active$' inside systemctl is-active forkd-controller.service
expect "the daemon answers on its socket" 'ok' inside curl -sS --unix-socket /run/forkd/forkd.sock http://localhost/healthz
expect "a guest runs" '^hello$' inside forkd run -- echo hello
expect "a sandbox with a limit" '"memory_limit_mib": 300' inside forkd spawn --tag run-python-numpy --memory-limit-mib 300 --json --timeout 1h
id=$(inside forkd ls -q | tail -n 1)
expect "the limit is a group of the unit" '^314572800$' limited
# The rest would only say the same again.
if [ "$failed" -gt 0 ]; then
    inside journalctl -u forkd-controller.service --no-pager -n 60
    echo "$passed passed, $failed failed"
    exit 1
fi
alive() { expect "the sandbox is there after $1" '^here$' inside forkd exec "$id" -- echo here; }
expect "systemctl restart" '' restarted
alive "a restart"
expect "kill -9" '' killed KILL
alive "a kill"
expect "the watchdog ends a daemon that hangs" '' killed STOP
alive "a hang"
expect "systemctl reload" '' reloaded
expect "a request starts the stopped daemon" 'ok' by_socket
alive "a stop"
expect "the package is installed again over itself" '' inside dpkg -i /root/forkd.deb
alive "an update"
inside systemd-analyze security forkd-controller.service 2>/dev/null | tail -n 1
expect "the package is removed" '' inside dpkg -r forkd
expect "no VM is left" '' no_vm_left
expect "the package is purged" '' inside dpkg -P forkd
expect "nothing is left" '' nothing_left
if [ "$failed" -gt 0 ]; then inside journalctl -u forkd-controller.service --no-pager -n 40; fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
