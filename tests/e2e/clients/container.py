"""A container image, as `docker save` writes it, becomes a sandbox.

    container.py FORKD FORKD-IMAGE FOLDER COPY…

Makes an archive of two layers from the shell of this host, with a whiteout, a linked folder, a user and a working
folder. Builds the disk of it in FOLDER, copies it to the daemon with `COPY… FILE :PATH`, and runs programs in it: as the
image says, and as a request says. A second image has one static program and nothing else. The last line counts cases.
"""

import hashlib
import io
import json
import pathlib
import re
import subprocess
import sys
import tarfile

FORKD, IMAGE, FOLDER, COPY = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4:]
INSTALLED = "/var/lib/forkd/images"
passed = failed = 0


def layer(*entries):
    """A plain archive of (name, bytes, mode), (name, None) for a folder and (name, text) for a symbolic link."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content, *mode in entries:
            info = tarfile.TarInfo(name)
            info.mode = mode[0] if mode else 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


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


def install(name, layers, run):
    archive = FOLDER / f"{name}.tar"
    save(archive, layers, run)
    disk = FOLDER / f"{name}.ext4"
    subprocess.run(
        [IMAGE, "build", f"docker-archive:{archive}", "--name", name, "--disk-mib", "64", "--out", disk], check=True
    )
    for file, at in [(disk, "root.ext4"), (disk.with_suffix(".json"), "image.json")]:
        subprocess.run([*COPY, file, f":{INSTALLED}/{name}/{at}"], check=True)


def forkd(*args):
    return subprocess.run([FORKD, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)


def case(name, body):
    global passed, failed
    try:
        body()
        passed += 1
        print(f"ok   {name}", flush=True)
    except (AssertionError, OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        failed += 1
        print(f"FAIL {name}: {error}", flush=True)


def runs_as_the_image_says():
    install("shell-image", *shell())
    line = "id -u; pwd; echo $GREETING; cat /app/kept /app/changed; test -e /app/old || echo ' gone'"
    done = forkd("run", "--image", "shell-image", "--", "sh", "-c", line)
    assert done.stdout == "1234\n/srv/work\nhello there\nkeptnew gone\n", done


def a_request_has_the_last_word():
    sandbox = json.loads(forkd("spawn", "--tag", "run-shell-image", "--json").stdout)[0]["id"]
    done = forkd("exec", "--user", "root", "--cwd", "/", sandbox, "--", "sh", "-c", "id -u; pwd")
    assert done.stdout == "0\n/\n", done
    forkd("kill", sandbox)


def a_single_static_program():
    install("scratch-image", [layer(("ldconfig", read("/sbin/ldconfig")))], {})
    done = forkd("run", "--image", "scratch-image", "--", "/ldconfig", "--version")
    assert done.returncode == 0 and "ldconfig" in done.stdout, done


case("a container image runs as it says", runs_as_the_image_says)
case("a request has the last word on user and folder", a_request_has_the_last_word)
case("an image of one static program boots", a_single_static_program)
for name in ["shell-image", "scratch-image"]:
    forkd("rmi", "--force", f"run-{name}")
print(f"{passed} passed, {failed} failed")
