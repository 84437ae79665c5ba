"""Requests made from the daemon's own OpenAPI document, many of them wrong: no answer that the document does not describe,
and no 5xx but the 503 of a limit.

    document.py SCHEMATHESIS URL TAG [EXAMPLES]

First every operation, with ids that are made up; then those of a sandbox, with a sandbox that lives. The last line counts
cases.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

SCHEMATHESIS, URL, TAG = sys.argv[1:4]
EXAMPLES = sys.argv[4] if len(sys.argv) > 4 else "50"
# Streams without end, archives, which no generator makes, and tokens: the first one makes the daemon ask for it.
LEFT_OUT = "/events|/watch|/terminal|/output|/stream|/tokens|/archive|/network/log|/connect|/v1/builds"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LIMITS = 'checks.not_a_server_error.expected-statuses = ["2xx", "4xx", 503]\n'
# Operations that would end or block the sandbox, or start a thousand children.
FATAL = ["DELETE /v1/sandboxes/{id}", "PATCH /v1/sandboxes/{id}", "POST /v1/sandboxes/{id}/pause", "POST /v1/sandboxes/{id}/fork"]
LIVE = r"^/v1/sandboxes/\{id\}"


def ask(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read()
        return json.loads(text) if text else None


def tags():
    return {one["tag"] for one in ask("GET", "/v1/snapshots")}


def schemathesis(settings, *options):
    # It reads its settings where it runs, and leaves a folder there.
    with tempfile.TemporaryDirectory() as work:
        pathlib.Path(work, "schemathesis.toml").write_text(settings)
        command = [SCHEMATHESIS, "run", f"{URL}/openapi.json", "--url", URL, "--checks", CHECKS]
        command += ["--exclude-path-regex", LEFT_OUT, "--max-examples", EXAMPLES, "--phases", "examples,coverage,fuzzing"]
        command += ["--request-timeout", "120", "--no-color", *options]
        return subprocess.run(command, cwd=work, check=False).returncode == 0


def with_a_sandbox():
    before = tags()
    sandbox = ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "timeout_secs": 7200})[0]["id"]
    try:
        options = ["--include-path-regex", LIVE]
        for name in FATAL:
            options += ["--exclude-name", name]
        fine = schemathesis(f'{LIMITS}parameters."path.id" = "{sandbox}"\n', *options)
        answer = ask("POST", f"/v1/sandboxes/{sandbox}/exec", {"args": ["echo", "alive"], "timeout_secs": 120})
        return fine and answer["stdout"] == "alive\n"
    finally:
        ask("DELETE", f"/v1/sandboxes/{sandbox}")
        for tag in tags() - before:
            ask("DELETE", f"/v1/snapshots/{tag}?force=true")


# The sandbox first: the other run deletes snapshots that it has seen in answers.
results = [with_a_sandbox(), schemathesis(LIMITS)]
print(f"{results.count(True)} passed, {results.count(False)} failed")
sys.exit(0 if all(results) else 1)
