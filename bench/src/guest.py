# Runs in the warm interpreter of a source: memory to change, and a clock that notices when it stood still.
import mmap as _mmap, os as _os, time as _time
import numpy as _np

_box = _mmap.mmap(-1, 4096)
_gap = memoryview(_box).cast('Q')

# The second number says until when to look. Looking takes a whole processor, which others may need.
def _watch():
    now = _time.monotonic_ns
    while True:
        t = last = now()
        while t < _gap[1]:
            t = now()
            if t - last > _gap[0]:
                _gap[0] = t - last
            last = t
        _time.sleep(0.002)

if _os.fork() == 0:
    _watch()

def bench_watch(ms):
    _gap[1] = _time.monotonic_ns() + ms * 1000000
    _time.sleep(0.05)
    _gap[0] = 0

# The longest gap in nanoseconds since bench_watch(), after its time is over.
def bench_gap():
    while _time.monotonic_ns() < _gap[1]:
        _time.sleep(0.01)
    return _gap[0]

def bench_room(mib):
    global _room
    _room = _np.zeros(mib << 20, dtype=_np.uint8)
    return mib

# Changes every page from one MiB up to another.
def bench_dirty(begin, end):
    _room[begin << 20:end << 20:4096] += 1
    return end

def bench_file(number, kib):
    with open('/root/bench-%d' % number, 'wb') as file:
        file.write(_os.urandom(kib << 10))
        file.flush()
        _os.fsync(file.fileno())
    return kib
