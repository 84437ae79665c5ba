# Runs in the warm interpreter of a source: memory to change, and a clock that notices when it stood still.
import mmap as _mmap, os as _os, time as _time
import numpy as _np

_box = _mmap.mmap(-1, 4096)
_gap = memoryview(_box).cast('Q')

def _watch():
    now = _time.monotonic_ns
    last = now()
    while True:
        t = now()
        if t - last > _gap[0]:
            _gap[0] = t - last
        last = t

def bench_watch():
    if _os.fork() == 0:
        _watch()

# The longest gap in nanoseconds since the last call.
def bench_gap():
    longest = _gap[0]
    _gap[0] = 0
    return longest

def bench_room(mib):
    global _room
    _room = _np.ones(mib << 20, dtype=_np.uint8)
    return mib

# Changes every page of so many MiB.
def bench_dirty(mib):
    _room[:mib << 20:4096] += 1
    return mib

def bench_file(number, kib):
    with open('/root/bench-%d' % number, 'wb') as file:
        file.write(_os.urandom(kib << 10))
        file.flush()
        _os.fsync(file.fileno())
    return kib
