"""Many clients at once against a running daemon with real guests: reads, execs, spawns.

    load.py URL TAG REQUESTS CLIENTS

Every answer must be a success or a refusal the API documents (JSON with a code), and the daemon's memory must not grow.
The last line counts cases.
"""

import collections
import http.client
import json
import random
import sys
import threading
import time
import urllib.parse

URL, TAG, REQUESTS, CLIENTS = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
HOST = urllib.parse.urlsplit(URL).netloc
# Refusals that mean "not now".
LATER = {"busy", "rate_limited", "limit_reached", "branch_slots_full"}
# Allowed growth of the daemon's heap between two equal loads.
GROWTH = 32 << 20

counts = collections.Counter()
wrong = []
times = collections.defaultdict(list)
lock = threading.Lock()


class Client:
    def __init__(self):
        self.http = http.client.HTTPConnection(HOST, timeout=300)

    def send(self, method, path, payload, headers):
        """Retries on a new connection if the old one was cut, which the machine's network does at times."""
        for last in (False, True):
            try:
                self.http.request(method, path, payload, headers)
                answer = self.http.getresponse()
                return answer, answer.read()
            except (ConnectionResetError, http.client.RemoteDisconnected):
                self.http.close()
                with lock:
                    counts["connection cut: sent again"] += 1
                    if last or counts["connection cut: sent again"] > 1 + REQUESTS // 200:
                        raise

    def ask(self, kind, method, path, body=None, also=()):
        begin = time.monotonic()
        payload = None if body is None else json.dumps(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            answer, text = self.send(method, path, payload, headers)
        except (OSError, http.client.HTTPException) as error:
            with lock:
                wrong.append((kind, repr(error)))
            return None
        value = json.loads(text) if text and "json" in answer.headers.get("content-type", "") else None
        with lock:
            times[kind].append(time.monotonic() - begin)
            if answer.status < 300:
                counts[kind] += 1
            elif isinstance(value, dict) and value.get("code") in LATER | set(also):
                counts[f"{kind}: {value['code']}"] += 1
                return None
            else:
                wrong.append((kind, answer.status, text[:200]))
                return None
        return value if value is not None else True


def one(client, sandboxes):
    dice = random.random()
    if dice < 0.35:
        client.ask("list sandboxes", "GET", "/v1/sandboxes")
    elif dice < 0.55:
        client.ask("list snapshots", "GET", "/v1/snapshots")
    elif dice < 0.70:
        client.ask("get", "GET", f"/v1/sandboxes/{random.choice(sandboxes)}")
    elif dice < 0.80:
        client.ask("version", "GET", "/version")
    elif dice < 0.85:
        client.ask("nothing", "GET", "/v1/sandboxes/sb-0-0", also=["sandbox_not_found"])
    elif dice < 0.99:
        done = client.ask("exec", "POST", f"/v1/sandboxes/{random.choice(sandboxes)}/exec",
                          {"args": ["true"], "timeout_secs": 120})
        if done and done["exit_code"] != 0:
            with lock:
                wrong.append(("exec", done))
    else:
        made = client.ask("spawn", "POST", "/v1/sandboxes", {"snapshot_tag": TAG, "timeout_secs": 600})
        for child in made or []:
            client.ask("delete", "DELETE", f"/v1/sandboxes/{child['id']}")


def load(requests, sandboxes):
    def work():
        client = Client()
        for _ in range(requests // CLIENTS):
            one(client, sandboxes)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def daemon_memory():
    # On a connection of its own: the daemon closes one that is idle for half a minute.
    _, text = Client().send("GET", "/metrics", None, {})
    text = text.decode()
    line = next(line for line in text.splitlines() if line.startswith("forkd_daemon_memory_bytes"))
    return float(line.split()[1])


def main():
    client = Client()
    made = client.ask("spawn", "POST", "/v1/sandboxes", {"snapshot_tag": TAG, "n": 2, "timeout_secs": 7200})
    sandboxes = [child["id"] for child in made]
    try:
        load(max(REQUESTS // 10, CLIENTS), sandboxes)
        before = daemon_memory()
        begin = time.monotonic()
        load(REQUESTS, sandboxes)
        took = time.monotonic() - begin
        after = daemon_memory()
    finally:
        client = Client()
        for one_id in sandboxes:
            client.ask("delete", "DELETE", f"/v1/sandboxes/{one_id}")
    left = client.ask("list sandboxes", "GET", "/v1/sandboxes?tag=" + TAG)
    for kind, all_times in sorted(times.items()):
        all_times.sort()
        at = lambda share: all_times[int((len(all_times) - 1) * share)] * 1000
        print(f"     {kind:16} {len(all_times):6}  p50 {at(.5):8.1f} ms  p99 {at(.99):8.1f} ms")
    for kind, count in sorted(counts.items()):
        if ":" in kind:
            print(f"     {kind}: {count}")
    print(f"     {REQUESTS} requests of {CLIENTS} clients in {took:.1f} s; "
          f"the daemon has {before / 2**20:.1f} MiB before and {after / 2**20:.1f} MiB after")
    results = {
        "every answer is a success or a documented refusal": not wrong,
        "the daemon's memory is flat": after - before < GROWTH,
        "no sandbox is left": not left,
    }
    for what, good in results.items():
        print(("ok   " if good else "FAIL ") + what)
    for row in wrong[:10]:
        print("     ", row)
    failed = sum(not good for good in results.values())
    print(f"{len(results) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


main()
