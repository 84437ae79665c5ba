"""The software bill of materials, in the CycloneDX format: every crate of the lock file that is in the programs, and the
Debian packages in kernel and image if the package has them."""

import json
from datetime import UTC, datetime
from pathlib import Path

from content import Content


def build(content: Content, records: list[Path], out: Path) -> Path:
    """Writes the bill. `records` are the records of images (image.json)."""
    components = crates(content.metadata)
    for record in records:
        components += debian(json.loads(record.read_text()))
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(content.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "name": "forkd",
                "version": content.version,
                "licenses": [{"expression": "Apache-2.0"}],
            },
        },
        "components": components,
    }
    path = out / f"forkd-{content.version}.cdx.json"
    path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n")
    return path


def crates(metadata: dict) -> list[dict]:
    """The crates that the programs are made of, without those that only tests and build scripts need."""
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    tests = {one["id"] for one in metadata["packages"] if "/tests/" in one["manifest_path"] and one["source"] is None}
    todo = [one for one in metadata["workspace_members"] if one not in tests]
    seen = set(todo)
    while todo:
        for needed in nodes[todo.pop()]["deps"]:
            normal = any(kind["kind"] is None for kind in needed["dep_kinds"])
            if normal and needed["pkg"] not in seen:
                seen.add(needed["pkg"])
                todo.append(needed["pkg"])
    found = [one for one in metadata["packages"] if one["id"] in seen and one["source"] is not None]
    return [crate(one) for one in sorted(found, key=lambda one: (one["name"], one["version"]))]


def crate(package: dict) -> dict:
    """One crate as a component."""
    component = {
        "type": "library",
        "name": package["name"],
        "version": package["version"],
        "purl": f"pkg:cargo/{package['name']}@{package['version']}",
    }
    if package["license"]:
        component["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
    return component


def debian(record: dict) -> list[dict]:
    """The Debian packages in an image."""
    return [
        {
            "type": "library",
            "group": record["name"],
            "name": one["name"],
            "version": one["version"],
            "purl": f"pkg:deb/debian/{one['name']}@{one['version'].replace(':', '%3A').replace('+', '%2B')}",
        }
        for one in record.get("packages", [])
    ]
