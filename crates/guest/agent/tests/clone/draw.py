"""Draws from every generator in two clones of one process: draw.py CLONE RUN_DIR [reseed]"""

import ctypes
import importlib.util
import json
import os
import random
import ssl
import sys
import tempfile

clones, directory, *wanted = sys.argv[1:]
spec = importlib.util.spec_from_file_location("runner", os.path.join(directory, "python.py"))
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)
generators = runner.Generators()
try:
    import numpy

    own = numpy.random.default_rng()
except ImportError:
    numpy = None
try:
    from cryptography.hazmat.primitives.asymmetric import x25519
except ImportError:
    x25519 = None


def draw():
    drawn = {
        "random": random.getrandbits(64),
        "openssl": ssl.RAND_bytes(16).hex(),
        "temporary name": next(tempfile._get_candidate_names()),
    }
    if numpy:
        drawn["numpy"] = float(numpy.random.random())
        drawn["numpy generator"] = float(own.random())
    if x25519:
        drawn["cryptography"] = x25519.X25519PrivateKey.generate().private_bytes_raw().hex()
    return drawn


draw()
generators.scan()
library = ctypes.CDLL(clones)
child = library.clone_process() == 0
if wanted:
    generators.reseed(b"entropy of one" if child else b"entropy of the other")
os.write(1, json.dumps(draw()).encode() + b"\n")
if not child:
    library.wait_for_clone()
os._exit(0)
