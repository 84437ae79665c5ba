#!/usr/bin/env python3
"""Results of E2B's suites: which tests count, what came of them, and the table in docs/e2b.md.

    results.py select LIST [PART…]                    print the tests (or files) of a list that contain a part; without
                                                      parts those of the classes in the table; the working
                                                      directory is that of the suite
    results.py collect FOLDER SUITE VERSION REPORT    add a report to the results; print what did not pass
    results.py matrix FOLDER DOCUMENT                 write the table

A list has one line for each test that needs a server: class, file, name. A test of a later version of the SDK than the
tested one is `absent`: the SDK lacks a name or a parameter that the test uses.
"""

import json
import pathlib
import re
import sys
import xml.etree.ElementTree as xml

HERE = pathlib.Path(__file__).parent
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
# The suites before the parts that need a lab with name resolution, a registry or a proxy.
CORE = ["files", "commands", "create/connect/lifecycle", "control list/info/kill", "snapshot/pause", "git-in-guest",
        "pty", "fork", "fs-only-pause", "metrics", "egress-block"]
# Classes that send traffic to other hosts, or to names of E2B. They are never run: tests of forkd stay on their host.
OUTSIDE = ["egress-internet", "egress-mitm+httpbin", "inbound-https-host"]
ABSENT = re.compile(
    r"ImportError|ModuleNotFoundError|AttributeError|unexpected keyword argument|has no attribute"
    r"|is not a function|is not a constructor|fixture '\w+' not found|Cannot read properties of undefined"
)


def listed(path):
    """Class and key of each test in a list."""
    found = {}
    for line in pathlib.Path(path).read_text().splitlines():
        kind, *key = line.split("\t")
        found["\t".join(key)] = kind
    return found


def select(path, parts):
    tests = {key.split("\t")[0]: kind for key, kind in listed(path).items()}
    if path.endswith("js.txt"):
        # A file runs as a whole.
        outside = {key.split("\t")[0] for key, kind in listed(path).items() if kind in OUTSIDE}
        tests = {name: kind for name, kind in tests.items() if name not in outside}
    names = [name for name, kind in tests.items() if kind not in OUTSIDE and (parts or kind in CORE)]
    names = [name for name in dict.fromkeys(names) if not parts or any(part in name for part in parts)]
    if path.endswith("js.txt"):
        names = [f"tests/{name}" for name in names]
    print("\n".join(name for name in names if exists(name)))


def exists(test):
    """The suite of an older SDK has fewer tests than the list."""
    file, _, name = test.partition("::")
    path = pathlib.Path(file)
    return path.exists() and (not name or f"def {name}(" in path.read_text())


def of_pytest(report):
    for case in xml.parse(report).iter("testcase"):
        # The test runs once for each parameter; all of them must pass.
        name = re.sub(r"\[.*\]$", "", case.get("name"))
        file = case.get("file") or case.get("classname").replace(".", "/") + ".py"
        verdict, text = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                text = (child.get("message") or "") + (child.text or "")
                verdict = "failed"
            elif child.tag == "skipped" and verdict == "passed":
                verdict = "skipped"
        yield f"{file}::{name}", verdict, text


def of_vitest(report):
    for file in json.loads(pathlib.Path(report).read_text())["testResults"]:
        path = file["name"].split("/tests/", 1)[1]
        for case in file["assertionResults"]:
            verdict = {"passed": "passed", "failed": "failed"}.get(case["status"], "skipped")
            yield f"{path}\t{case['fullName'].strip()}", verdict, "\n".join(case.get("failureMessages") or [])


def collect(folder, suite, version, report):
    path = pathlib.Path(folder) / f"{suite}-{version}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kinds = {"python": "python.txt", "js": "js.txt"}.get(suite)
    kinds = listed(HERE / kinds) if kinds else None
    seen = {}
    for key, verdict, text in (of_vitest if suite == "js" else of_pytest)(report):
        if kinds is not None and key not in kinds:
            continue
        if verdict == "failed" and ABSENT.search(text):
            verdict = "absent"
        worst = ["passed", "skipped", "absent", "failed"]
        before = seen.get(key, ("passed", "", ""))
        if key not in seen or worst.index(verdict) > worst.index(before[0]):
            seen[key] = (verdict, text, kinds[key] if kinds else "code interpreter")
    for key, (verdict, text, kind) in seen.items():
        kept[key] = {"verdict": verdict, "class": kind}
        if verdict in ("failed", "absent"):
            print(f"{verdict} {kind}: {key}\n    {text.strip()[:160]!r}")
    path.write_text(json.dumps(kept, indent=1, sort_keys=True))
    verdicts = [entry[0] for entry in seen.values()]
    print(", ".join(f"{verdicts.count(word)} {word}" for word in ("passed", "failed", "absent", "skipped")))
    sys.exit("failed" in verdicts)


def cell(entries):
    verdicts = [entry["verdict"] for entry in entries]
    total = sum(verdict != "skipped" for verdict in verdicts)
    absent = verdicts.count("absent")
    text = f"{verdicts.count('passed')} of {total - absent}"
    return text if total else "-"


def matrix(folder, document):
    runs = []
    for path in sorted(pathlib.Path(folder).glob("*-*.json")):
        suite, version = path.stem.split("-", 1)
        order = (["python", "js", "interpreter"].index(suite), [-int(part) for part in version.split(".")])
        runs.append((order, suite, version, json.loads(path.read_text())))
    runs.sort(key=lambda run: run[0])
    heads = {"python": "Python", "js": "JavaScript"}
    shown = [run for run in runs if run[1] in heads]
    lines = ["| class | " + " | ".join(f"{heads[suite]} {version}" for _, suite, version, _ in shown) + " |",
             "|---" * (len(shown) + 1) + "|"]
    of = lambda results, kinds: [entry for entry in results.values() if entry["class"] in kinds]  # noqa: E731
    for kind in CORE:
        lines.append(f"| {kind} | " + " | ".join(cell(of(results, [kind])) for *_, results in shown) + " |")
    lines.append("| **sum** | " + " | ".join(f"**{cell(of(results, CORE))}**" for *_, results in shown) + " |")
    for _, suite, version, results in runs:
        if suite == "interpreter":
            lines.append("")
            lines.append(f"Code interpreter, Python {version}: {cell(list(results.values()))}.")
    path = pathlib.Path(document)
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


def main():
    command, *rest = sys.argv[1:]
    if command == "select":
        select(rest[0], rest[1:])
    elif command == "collect":
        collect(*rest)
    else:
        matrix(*rest)


main()
