"""Container images become sandboxes: an archive that is sent along, and an image in a registry.

    container.py FORKD FOLDER

Makes an archive of two layers from the shell of this host, with a whiteout, a linked folder, a user and a working
folder, and an image of one static program. The archive is sent to the daemon; the other image is fetched from a registry
that runs in the daemon's machine. FOLDER is for files. The last line counts cases.
"""

import hashlib
import json
import pathlib
import re
import subprocess
import sys

from cases import check, finish
from layers import layer

FORKD, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2])
PORT = 5055
SCRATCH = f"127.0.0.1:{PORT}/team/scratch:1"
SECRET = "open sesame"


def save(path, layers, run):
    """Writes what `docker save` writes."""
    digests = ["sha256:" + hashlib.sha256(bytes_).hexdigest() for bytes_ in layers]
    config = {"os": "linux", "architecture": "amd64", "config": run, "rootfs": {"type": "layers", "diff_ids": digests}}
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": None, "Layers": names}]
    files = [("config.json", json.dumps(config).encode()), ("manifest.json", json.dumps(manifest).encode())]
    path.write_bytes(layer(*files, *zip(names, layers)))


def read(path):
    return pathlib.Path(path).read_bytes()


def shell():
    """The programs sh, id and cat of this host, and the libraries they need."""
    programs = ["/bin/sh", "/usr/bin/id", "/bin/cat"]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    libraries = sorted(set(re.findall(r"(/\S+) \(0x", listed)))
    lower = [("usr/bin", None), ("usr/lib", None), ("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib")]
    lower += [("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:1234:1234::/srv:/bin/sh\n", 0o644)]
    lower += [("app/old", b"old"), ("app/kept", b"kept"), ("app/changed", b"old")]
    upper = [(f"bin/{pathlib.Path(name).name}", read(name)) for name in programs]
    # A layer may name a file through a link of a lower layer.
    upper += [(f"lib/{pathlib.Path(name).name}", read(name)) for name in libraries]
    upper += [("app/.wh.old", b""), ("app/changed", b"new")]
    run = {"Env": ["GREETING=hello there", "LD_LIBRARY_PATH=/usr/lib"], "User": "app", "WorkingDir": "/srv/work"}
    return [layer(*lower), layer(*upper)], run


def serve(layers, run):
    """Puts an image into a registry in the machine of the daemon."""
    config = {"os": "linux", "architecture": "amd64", "config": run}
    config["rootfs"] = {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(one).hexdigest() for one in layers]}
    blobs = [json.dumps(config).encode(), *layers]
    names = ["sha256:" + hashlib.sha256(blob).hexdigest() for blob in blobs]
    named = [{"digest": name, "size": len(blob)} for name, blob in zip(names, blobs)]
    manifest = {"schemaVersion": 2, "config": named[0], "layers": named[1:]}
    files = [("manifests/1", json.dumps(manifest).encode())]
    files += [(f"blobs/{name}", blob) for name, blob in zip(names, blobs)]
    archive = FOLDER / "registry.tar"
    archive.write_bytes(layer(*files))
    server = pathlib.Path(__file__).with_name("registry.py")
    for file, at in [(archive, "/tmp/registry.tar"), (server, "/tmp/registry.py")]:
        subprocess.run([FORKD, "machine", "cp", file, f":{at}"], check=True)
    start = (
        "rm -rf /tmp/registry && mkdir /tmp/registry && tar -C /tmp/registry -xf /tmp/registry.tar &&"
        f" (setsid python3 /tmp/registry.py /tmp/registry {PORT} 'reader:{SECRET}' </dev/null >/dev/null 2>&1"
        " & echo $! >/tmp/registry.pid) &&"
        f" for i in $(seq 300); do curl -so /dev/null http://127.0.0.1:{PORT}/ && break; sleep 0.2; done"
    )
    in_machine(start)


def in_machine(line):
    subprocess.run([FORKD, "machine", "exec", "--no-sync", "--", "sh", "-c", line], check=True, stdin=subprocess.DEVNULL)


def forkd(*args):
    return subprocess.run([FORKD, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)


def runs_as_the_image_says():
    archive = FOLDER / "shell-image.tar"
    save(archive, *shell())
    line = "id -u; pwd; echo $GREETING; cat /app/kept /app/changed; test -e /app/old || echo ' gone'"
    done = forkd("run", "--disk", "64M", f"docker-archive:{archive}", "--", "sh", "-c", line)
    assert done.stdout == "1234\n/srv/work\nhello there\nkeptnew gone\n", done
    shown = json.loads(forkd("image", "inspect", "shell-image", "--json").stdout)
    assert shown["user"] == "app" and shown["snapshots"] == ["run-shell-image"], shown


def a_request_has_the_last_word():
    sandbox = json.loads(forkd("spawn", "--tag", "run-shell-image", "--json").stdout)[0]["id"]
    done = forkd("exec", "--user", "root", "--cwd", "/", sandbox, "--", "sh", "-c", "id -u; pwd")
    assert done.stdout == "0\n/\n", done
    forkd("kill", sandbox)


def refused(*args):
    done = forkd(*args, "--json")
    assert done.returncode != 0, done
    return json.loads(done.stdout)["code"]


def a_single_static_program():
    serve([layer(("ldconfig", read("/sbin/ldconfig")))], {"Entrypoint": ["/ldconfig"], "ExposedPorts": {"80/tcp": {}}})
    why = refused("image", "pull", SCRATCH)
    assert why == "registry_denied", why
    secret = FOLDER / "password"
    secret.write_text(SECRET + "\n")
    login = ["--registry-user", "reader", "--password-file", str(secret)]
    done = forkd("run", "--disk", "64M", *login, SCRATCH, "--", "/ldconfig", "--version")
    assert done.returncode == 0 and "ldconfig" in done.stdout, done
    assert refused("image", "pull", *login, SCRATCH.replace(":1", ":2")) == "image_not_found"


def an_image_that_is_here_is_not_fetched_again():
    in_machine("kill $(cat /tmp/registry.pid)")
    done = forkd("run", SCRATCH, "--", "/ldconfig", "--version")
    assert done.returncode == 0 and "ldconfig" in done.stdout, done
    assert refused("image", "pull", "--pull", "always", SCRATCH) == "registry_failed"
    name = json.loads(forkd("image", "pull", SCRATCH, "--json").stdout)["name"]
    shown = json.loads(forkd("image", "inspect", name, "--json").stdout)
    assert shown["source"] == SCRATCH and shown["ports"] == [80] and shown["public"] is False, shown
    forkd("rmi", "--force", f"run-{name}")


def bad_names_have_clear_reasons():
    assert refused("image", "pull", "python:3-slim") == "invalid_request"
    assert "no default registry" in forkd("image", "pull", "python:3-slim").stderr


def images_go():
    forkd("rmi", "--force", "run-shell-image")
    pruned = json.loads(forkd("image", "prune", "--json").stdout)
    assert "shell-image" in pruned["images"] and len(pruned["images"]) >= 2, pruned
    assert refused("image", "inspect", "shell-image") == "image_not_found"


forkd("image", "rm", "shell-image")
check("an archive runs as it says", runs_as_the_image_says)
check("a request has the last word on user and folder", a_request_has_the_last_word)
check("an image of one static program in a registry boots", a_single_static_program)
check("an image that is here is not fetched again", an_image_that_is_here_is_not_fetched_again)
check("bad names have clear reasons", bad_names_have_clear_reasons)
check("images go", images_go)
finish()
