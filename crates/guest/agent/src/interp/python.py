"""Keeps one Python interpreter warm and runs what the agent sends. See the agent's README for the protocol."""

import ast
import base64
import gc
import json
import linecache
import os
import queue
import signal
import struct
import sys
import threading
import traceback
import types

try:
    # The whole of hashlib brings OpenSSL along, which takes longer than everything else here together.
    from _sha3 import shake_256
except ImportError:
    from hashlib import shake_256

MAX_MESSAGE = 32 * 1024 * 1024
MAX_TEXT = 4 * 1024 * 1024
RUNNER = __file__
# What a code object says that awaits something; inspect has the name but is slow to import.
IS_COROUTINE = 128


class Channel:
    """The socket to the agent, moved away from standard input."""

    def __init__(self):
        self.fd = os.dup(0)
        os.set_inheritable(self.fd, False)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self.lock = threading.Lock()

    def read(self):
        header = self.read_exactly(4)
        if header is None:
            return None
        (length,) = struct.unpack("<I", header)
        if length > MAX_MESSAGE:
            return None
        body = self.read_exactly(length)
        return None if body is None else json.loads(body)

    def read_exactly(self, count):
        parts = []
        while count:
            try:
                part = os.read(self.fd, min(count, 1 << 20))
            except InterruptedError:
                continue
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def write(self, message):
        body = json.dumps(message, separators=(",", ":")).encode()
        data = memoryview(struct.pack("<I", len(body)) + body)
        with self.lock:
            while data:
                data = data[os.write(self.fd, data):]


class Session:
    """The module that the code of all calls shares."""

    def __init__(self):
        self.module = types.ModuleType("__main__")
        self.module.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = self.module
        self.space = self.module.__dict__
        self.count = 0
        self.running = False
        self.loop = None
        self.lock = threading.Lock()
        self.current = 0
        self.interrupted = set()

    def begin(self, call):
        """A call that is interrupted before it begins does not begin."""
        with self.lock:
            self.current = call
            self.running = True
            if call in self.interrupted:
                raise KeyboardInterrupt

    def interrupt(self, call):
        """Interrupts a call, whether it waits, runs, or has ended."""
        with self.lock:
            if call > self.current:
                self.interrupted.add(call)
            elif call == self.current and self.running:
                # To the whole group, as a terminal does: programs that the code waits for end as well.
                os.killpg(0, signal.SIGINT)

    def run(self, mode, code, call):
        self.count += 1
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            self.begin(call)
            value = self.evaluate(mode, code, name)
            self.running = False
            return self.describe(value)
        except BaseException as error:  # noqa: B902 - SystemExit and KeyboardInterrupt are results too
            self.running = False
            return {"error": describe_error(error)}
        finally:
            self.running = False
            self.interrupted.discard(call)
            flush()

    def evaluate(self, mode, code, name):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        if mode == "eval":
            return self.call(compile(code.strip(), name, "eval", flags, True))
        tree = compile(code, name, "exec", flags | ast.PyCF_ONLY_AST, True)
        last = None
        if mode != "exec" and tree.body and isinstance(tree.body[-1], ast.Expr):
            # A semicolon at the end keeps the value back, as in the tools people know.
            if not code.rstrip().endswith(";"):
                last = ast.Expression(tree.body.pop().value)
        if tree.body:
            self.call(compile(tree, name, "exec", flags, True))
        if last is None:
            return None
        return self.call(compile(last, name, "eval", flags, True))

    def call(self, code):
        if not code.co_flags & IS_COROUTINE:
            return eval(code, self.space)
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(eval(code, self.space))
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            task.cancel()
            raise

    def describe(self, value):
        result = {}
        display = figures()
        if value is not None:
            self.space["_"] = value
            result["repr"] = cut(repr(value))
            text = as_json(value)
            if text is not None:
                result["json"] = text
            display.update(forms(value))
        if display:
            result["display"] = display
        return result


def cut(text):
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def as_json(value):
    """The value itself if it survives JSON unchanged."""
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return value if len(text) <= MAX_TEXT else None


FORMS = (
    ("_repr_html_", "text/html"),
    ("_repr_markdown_", "text/markdown"),
    ("_repr_svg_", "image/svg+xml"),
    ("_repr_png_", "image/png"),
    ("_repr_jpeg_", "image/jpeg"),
    ("_repr_latex_", "text/latex"),
    ("_repr_json_", "application/json"),
)


def forms(value):
    """Other forms of a value by media type."""
    if isinstance(value, type):
        return {}
    found = {}
    for method, media in FORMS:
        try:
            form = getattr(value, method, None)
            form = form() if callable(form) else None
        except Exception:
            continue
        if isinstance(form, bytes):
            form = base64.b64encode(form).decode()
        if form is not None and len(str(form)) <= MAX_TEXT:
            found[media] = form
    return found


def figures():
    """Turns open plots into pictures: the guest has no display."""
    plots = sys.modules.get("matplotlib.pyplot")
    if plots is None or not plots.get_fignums():
        return {}
    import io

    buffer = io.BytesIO()
    try:
        plots.gcf().savefig(buffer, format="png")
        plots.close("all")
    except Exception:
        return {}
    return {"image/png": base64.b64encode(buffer.getvalue()).decode()}


def describe_error(error):
    name = type(error).__qualname__
    module = type(error).__module__
    if module not in ("builtins", "__main__"):
        name = f"{module}.{name}"
    try:
        message = str(error)
    except Exception:
        message = ""
    try:
        lines = without_runner(traceback.TracebackException.from_exception(error)).format()
        text = "".join(lines)
    except Exception:
        text = f"{name}: {message}\n"
    return {"name": name, "message": cut(message), "traceback": cut(text)}


def without_runner(report):
    """A traceback that begins and ends in the caller's own code."""
    link = report
    while link is not None:
        frames = [frame for frame in link.stack if frame.filename != RUNNER]
        link.stack = traceback.StackSummary.from_list(frames)
        link = link.__cause__ or link.__context__
    return report



def flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


def warm_up(session, imports, code, call):
    lines = []
    for module in imports:
        lines.append(module if module.startswith(("import ", "from ")) else f"import {module}")
    result = session.run("exec", "\n".join(lines + [code]), call)
    session.count = 0
    return result


class Generators:
    """Random number generators whose state a fork would share with its parent."""

    def __init__(self):
        self.known = None

    def scan(self):
        """Finds NumPy generators that were seeded by the system. Slow, so done before a freeze."""
        self.known = []
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return
        for thing in gc.get_objects():
            if isinstance(thing, numpy.Generator) and seeded_by_system(thing.bit_generator):
                self.known.append(thing)

    def reseed(self, entropy):
        def derive(label, count=32):
            return shake_256(entropy + label).digest(count)

        if "random" in sys.modules:
            sys.modules["random"].seed(derive(b"random"))
        if "tempfile" in sys.modules:
            sys.modules["tempfile"]._name_sequence = None
        if "uuid" in sys.modules:
            sys.modules["uuid"]._node = None
            sys.modules["uuid"]._last_timestamp = None
        reseed_openssl(derive(b"openssl"))
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return
        words = [word for (word,) in struct.iter_unpack("<I", derive(b"numpy", 64))]
        numpy.seed(words)
        if self.known is None:
            self.scan()
        for number, generator in enumerate(self.known):
            seed = int.from_bytes(derive(b"generator %d" % number), "little")
            fresh = type(generator.bit_generator)(seed)
            generator.bit_generator.state = fresh.state


def reseed_openssl(seed):
    """Reseeds every OpenSSL in this process, of which wheels bring their own.

    OpenSSL notices a fork by its process ID, and a child has that of its siblings. Each call mixes the seed and fresh
    bytes of the kernel into the primary generator, from which the generators of all threads then reseed.
    """
    if "_ssl" in sys.modules:
        sys.modules["_ssl"].RAND_add(seed, float(len(seed)))
    rust = sys.modules.get("cryptography.hazmat.bindings._rust")
    if rust is not None:
        # Linked into the extension module without a symbol that others could find.
        rust._openssl.lib.RAND_add(seed, len(seed), float(len(seed)))
    for path in openssl_libraries():
        import ctypes

        ctypes.CDLL(path).RAND_seed(seed, len(seed))


def openssl_libraries():
    """The shared objects of OpenSSL's libcrypto that are mapped into this process."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if "/libcrypto" in line}
    return sorted(path for path in paths if os.path.basename(path).startswith("libcrypto"))


def seeded_by_system(bit_generator):
    sequence = getattr(bit_generator, "seed_seq", None) or getattr(bit_generator, "_seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return isinstance(entropy, int) and entropy >= 1 << 64


def collect(generators):
    """Leaves the heap as a fork likes it: small, and not written to by the next collection."""
    generators.scan()
    gc.collect()
    gc.freeze()
    try:
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)
    except Exception:
        pass


def alone():
    """True if no code of the user can run before the next call: there is no other thread and no timer.

    The two threads are the main thread and the one that reads messages.
    """
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return len(sys._current_frames()) <= 2 and not any(signal.getitimer(timer)[0] for timer in timers)


def serve_controls(channel, calls, session, generators):
    """Reads messages for ever. What need not wait for a call under way is done here."""
    while True:
        message = channel.read()
        if message is None:
            os._exit(0)
        if message["op"] in ("run", "warmup"):
            calls.put(message)
            continue
        answer = {"id": message["id"]}
        try:
            if message["op"] == "reseed":
                generators.reseed(bytes.fromhex(message["entropy"]))
            elif message["op"] == "interrupt":
                session.interrupt(message["call"])
            elif message["op"] == "collect":
                collect(generators)
                answer["alone"] = alone()
            else:
                answer["error"] = {"name": "Unsupported", "message": message["op"]}
        except Exception as error:
            answer["error"] = describe_error(error)
        channel.write(answer)


def main():
    channel = Channel()
    os.register_at_fork(after_in_child=lambda: os.close(channel.fd))
    sys.path[0] = ""
    sys.argv = [""]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    session = Session()
    calls = queue.SimpleQueue()
    generators = Generators()

    def interrupted(_number, _frame):
        if session.running:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    threading.Thread(target=serve_controls, args=(channel, calls, session, generators), daemon=True).start()
    channel.write({"op": "hello", "language": "python", "version": sys.version.split()[0]})
    while True:
        message = calls.get()
        try:
            if message["op"] == "warmup":
                imports, code = message.get("imports", []), message.get("code", "")
                result = warm_up(session, imports, code, message["id"])
            else:
                result = session.run(message.get("mode", "auto"), message["code"], message["id"])
        except KeyboardInterrupt as error:
            result = {"error": describe_error(error)}
        result["id"] = message["id"]
        result["count"] = session.count
        result["alone"] = alone()
        try:
            channel.write(result)
        except (TypeError, ValueError):
            for key in ("json", "display"):
                result.pop(key, None)
            channel.write(result)


if __name__ == "__main__":
    main()
