"""Images are built from Dockerfiles in microVMs, run, exported and read again.

    build.py FORKD FOLDER UMOCI ROUNDS

Makes a base image from the shell of this host and builds on it: stages, cache, mounts, a step that fails, a build that is
interrupted ROUNDS times. `umoci` reads the export. FOLDER is for files. The last line counts cases.
"""

import hashlib
import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

from cases import check, finish
from layers import layer

FORKD, FOLDER, UMOCI = sys.argv[1], pathlib.Path(sys.argv[2]) / "build", sys.argv[3]
ROUNDS = int(sys.argv[4])
CONTEXT = FOLDER / "context"
SECRET = "sesame-never-in-an-image"

DOCKERFILE = """\
# syntax=docker/dockerfile:1
ARG BASE=shell-base
FROM ${BASE} AS tools
ARG LEVEL=7
RUN <<EOF
#!/bin/sh
echo "made by a script, level $LEVEL" >/script
EOF
RUN mkdir -p /out/deep && echo tool >/out/deep/tool && ln -s tool /out/deep/link

FROM ${BASE}
ENV GREETING="hello there" PLACE=/srv/work
WORKDIR $PLACE
COPY --chown=app:app --chmod=750 src/ ./src/
COPY --from=tools /out/ /script ./tools/
COPY <<conf /etc/app.conf
place = $PLACE
conf
RUN --mount=type=secret,id=token --mount=type=cache,target=/cache \\
    --mount=type=bind,source=src,target=/seen --mount=type=tmpfs,target=/scratch \\
    cat /run/secrets/token >/scratch/copy && cat /seen/two && echo again >>/cache/log && cat /cache/log >runs && { sleep 600 & }
RUN cat src/two && cat /cache/log 2>/dev/null; test ! -e /run/secrets/token && test ! -e /seen
USER app
ENTRYPOINT ["/bin/sh", "-c"]
CMD ["id -u"]
EXPOSE 8080
"""


def base_image(path):
    """A saved image with a shell and a few programs of this host."""
    programs = [shutil.which(name) for name in ["sh", "id", "cat", "ls", "mkdir", "ln", "sleep", "stat"]]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    libraries = sorted(set(re.findall(r"(/\S+) \(0x", listed)))
    read = lambda name: pathlib.Path(name).read_bytes()
    files = [("usr/bin", None), ("usr/lib", None), ("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib")]
    files += [("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:1234:1234::/srv:/bin/sh\n", 0o644)]
    files += [("etc/group", b"root:x:0:\napp:x:1234:\n", 0o644), ("root", None)]
    files += [(f"usr/bin/{pathlib.Path(name).name}", read(name)) for name in programs]
    files += [(f"usr/lib/{pathlib.Path(name).name}", read(name)) for name in libraries]
    content = layer(*files)
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    run = {"Env": ["LD_LIBRARY_PATH=/usr/lib"]}
    config = {"os": "linux", "architecture": "amd64", "config": run, "rootfs": {"type": "layers", "diff_ids": [digest]}}
    manifest = [{"Config": "config.json", "RepoTags": None, "Layers": ["layer.tar"]}]
    documents = [("config.json", json.dumps(config).encode()), ("manifest.json", json.dumps(manifest).encode())]
    path.write_bytes(layer(*documents, ("layer.tar", content)))


def forkd(*args, **more):
    return subprocess.run([FORKD, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900, **more)


def build(name, *more, text=DOCKERFILE):
    (CONTEXT / "Dockerfile").write_text(text)
    secret = FOLDER / "token"
    secret.write_text(SECRET)
    flags = ["--disk", "128M", "--memory", "256M", "--secret", f"id=token,src={secret}", "--network", "none"]
    return forkd("build", "-t", name, *flags, *more, str(CONTEXT))


def sandboxes():
    return json.loads(forkd("ls", "--json").stdout)


def a_dockerfile_becomes_an_image():
    before = len(sandboxes())
    done = build("built", "--build-arg", "LEVEL=9")
    assert done.returncode == 0 and done.stdout == "built\n", done
    assert "2\n" in done.stderr and SECRET not in done.stderr, done
    assert len(sandboxes()) == before, sandboxes()
    line = "id -u; pwd; echo $GREETING; cat tools/script runs /etc/app.conf tools/deep/link; stat -c '%a %U' src/one; ls -a /; ls src"
    done = forkd("run", "built", "--", "sh", "-c", line)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["1234", "/srv/work", "hello there"], done
    assert lines[3:8] == ["made by a script, level 9", "again", "place = /srv/work", "tool", "750 app"], done
    assert ".forkd-build" not in lines and "cache" not in lines and "seen" not in lines, done
    assert lines[-2:] == ["one", "two"], "ignored files are not copied: " + repr(lines)
    shown = json.loads(forkd("image", "inspect", "built", "--json").stdout)
    assert shown["entrypoint"] == ["/bin/sh", "-c"] and shown["cmd"] == ["id -u"] and shown["ports"] == [8080], shown


def only_what_follows_a_change_runs_again():
    done = json.loads(build("built", "--build-arg", "LEVEL=9", "--json").stdout)
    assert done["ran"] == 0 and done["cached"] == 7, done
    (CONTEXT / "src/two").write_text("22\n")
    done = json.loads(build("built", "--build-arg", "LEVEL=9", "--json").stdout)
    assert done["ran"] == 5 and done["cached"] == 2, done
    # The cache mount was kept over both builds, and the image that runs is the new one.
    done = forkd("run", "built", "--", "cat", "runs", "src/two")
    assert done.stdout == "again\nagain\n22\n", done


def a_failed_step_can_be_entered():
    text = "FROM shell-base\nRUN echo state >/tmp/state\nRUN echo so far && exit 3\n"
    done = build("broken", "--json", text=text)
    why = json.loads(done.stdout)
    assert why["code"] == "step_failed" and "line 3" in why["error"] and done.returncode == 1, why
    sandbox = re.search(r"forkd shell (\S+)`", why["hint"]).group(1)
    assert forkd("exec", sandbox, "--", "cat", "/tmp/state").stdout == "state\n"
    forkd("kill", sandbox)
    why = json.loads(build("broken", "--json", text="FROM shell-base\n\nONBUILD RUN true\n").stdout)
    assert why["code"] == "unsupported_instruction" and "line 3" in why["error"], why


def an_interrupt_ends_the_build():
    before = len(sandboxes())
    (CONTEXT / "Dockerfile").write_text("FROM shell-base\nRUN echo begun && sleep 600\n")
    command = [FORKD, "build", "-t", "never", "--disk", "128M", "--memory", "256M", str(CONTEXT)]
    for number in range(ROUNDS):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        # The first in the middle of its step, the others at any moment.
        while number == 0 and process.stderr.readline() != "begun\n":
            assert process.poll() is None, process
        time.sleep(random.uniform(0, 4) if number else 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        process.stderr.close()
    for _ in range(600):
        if len(sandboxes()) == before:
            return
    raise AssertionError(sandboxes())


def nothing_but_a_program():
    text = "FROM shell-base AS files\nFROM scratch\nCOPY --from=files /usr/lib/ /usr/lib/\n"
    text += "COPY --from=files /usr/bin/cat /cat\nCOPY --from=files /usr/lib/ld-linux* /lib64/\nCOPY src/one /one\n"
    text += "ENV LD_LIBRARY_PATH=/usr/lib\n"
    done = build("bare", text=text)
    assert done.returncode == 0, done
    done = forkd("run", "bare", "--", "/cat", "/one")
    assert done.stdout == "1\n", done


def others_read_the_export():
    layout, bundle = FOLDER / "layout", FOLDER / "bundle"
    done = forkd("export", "built", f"oci:{layout}")
    assert done.returncode == 0, done
    assert not any(SECRET.encode() in path.read_bytes() for path in layout.rglob("*") if path.is_file())
    subprocess.run([UMOCI, "unpack", "--rootless", "--image", f"{layout}:built", str(bundle)], check=True, capture_output=True)
    assert (bundle / "rootfs/srv/work/tools/deep/link").read_text() == "tool\n"
    assert not (bundle / "rootfs/etc/forkd").exists() and not (bundle / "rootfs/.forkd-build").exists()
    process = json.loads((bundle / "config.json").read_text())["process"]
    assert process["cwd"] == "/srv/work" and "GREETING=hello there" in process["env"], process
    archive = FOLDER / "built.tar"
    assert forkd("export", "built", f"oci-archive:{archive}").returncode == 0
    done = forkd("image", "pull", f"oci-archive:{archive}", "--name", "again", "--disk", "128M")
    assert done.returncode == 0, done
    shown = json.loads(forkd("image", "inspect", "again", "--json").stdout)
    assert shown["user"] == "app" and shown["entrypoint"] == ["/bin/sh", "-c"], shown


def everything_goes():
    for name in ["built", "bare", "again"]:
        forkd("rmi", "--force", f"run-{name}")
        done = forkd("image", "rm", name)
        assert done.returncode == 0, done
    forkd("image", "prune")
    forkd("image", "rm", "shell-base")


shutil.rmtree(FOLDER, ignore_errors=True)
(CONTEXT / "src").mkdir(parents=True)
for name, content in [("src/one", "1\n"), ("src/two", "2\n"), ("src/left.log", "x"), (".dockerignore", "**/*.log\n")]:
    (CONTEXT / name).write_text(content)
for name in ["built", "bare", "again", "shell-base"]:
    forkd("rmi", "--force", f"run-{name}")
    forkd("image", "rm", name)
base_image(FOLDER / "base.tar")
made = forkd("image", "pull", f"docker-archive:{FOLDER}/base.tar", "--name", "shell-base", "--disk", "128M")
print(made.stderr, end="", file=sys.stderr)
check("a Dockerfile becomes an image", a_dockerfile_becomes_an_image)
check("only what follows a change runs again", only_what_follows_a_change_runs_again)
check("a failed step can be entered", a_failed_step_can_be_entered)
check("an interrupt ends the build", an_interrupt_ends_the_build)
check("an image of nothing but a program", nothing_but_a_program)
check("others read the export", others_read_the_export)
check("everything goes", everything_goes)
finish()
