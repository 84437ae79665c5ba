"""Counts the cases of a test program. A case that fails is printed, and the next one runs.

    with case("a name"): …        or        check("a name", function)
    finish()                      prints the line that the runner reads, and exits
"""

import sys
import time
import traceback
import urllib.error

passed, failed = [], []


class case:
    """A named step. An exception in it is a failure."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.started = time.monotonic()

    def __exit__(self, kind, error, trace):
        took = time.monotonic() - self.started
        if kind is None:
            passed.append(self.name)
            print(f"ok   {self.name} ({took:.1f} s)", flush=True)
            return True
        if not issubclass(kind, Exception):
            return False
        failed.append(self.name)
        print(f"FAIL {self.name} ({took:.1f} s)", flush=True)
        if isinstance(error, urllib.error.HTTPError):
            print(error.read()[:4000].decode(errors="replace"))
        traceback.print_exception(kind, error, trace, file=sys.stdout)
        return True


def check(name, body):
    """A step that is a function."""
    with case(name):
        body()


def finish():
    """Prints the counts and exits: with 1 if a case failed."""
    print(f"{len(passed)} passed, {len(failed)} failed", flush=True)
    sys.exit(1 if failed else 0)
