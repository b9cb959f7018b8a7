"""What a release consists of, and whether its parts have known vulnerabilities.

    python .ci/supply_chain.py sbom dist/*.whl dist/*.tar.gz > dist/warpi.cdx.json
    pip-audit --format json ... | python .ci/supply_chain.py audit

`sbom` writes the bill of materials of warpi and everything that `warpi[all]` needs, as installed in this environment
(CycloneDX 1.6), with the hashes of the files of the release. `audit` reads the report of pip-audit; its exit code is 1
if there is a vulnerability. It says how many packages the registry has no data about, since some registries have none.
"""

import hashlib
import json
import re
import sys
import uuid
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

Json = dict[str, Any]


def dependencies(package: str, extra: str) -> dict[str, set[str]]:
    """The installed packages that `package[extra]` needs, directly or not: for each, the names of those it needs."""
    graph: dict[str, set[str]] = {}
    waiting = [(package, extra)]
    seen = {*waiting}
    while waiting:
        name, extra = waiting.pop()
        needs = graph.setdefault(_name(name), set())
        for need in map(Requirement, distribution(name).requires or ()):
            if need.marker is not None and not need.marker.evaluate({"extra": extra}):
                continue
            try:
                found = _name(need.name)
            except PackageNotFoundError:  # a package of another platform
                continue
            needs |= {found} - {_name(name)}
            more = {(found, each) for each in (need.extras or {""})} - seen
            seen |= more
            waiting += sorted(more)
    return graph


def _name(name: str) -> str:
    return str(distribution(name).metadata["Name"])


def sbom(files: Iterable[Path]) -> Json:
    """The bill of materials. It is the same for the same release in the same environment."""
    graph = dependencies("warpi", "all")
    parts = {name: _component(distribution(name)) for name in sorted(graph)}
    release = parts.pop("warpi")
    release["type"] = "application"
    release["components"] = [
        {
            "type": "file",
            "name": file.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
        }
        for file in files
    ]
    refs = {name: part["bom-ref"] for name, part in (parts | {"warpi": release}).items()}
    content: Json = {
        "metadata": {"component": release},
        "components": [*parts.values()],
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[need] for need in graph[name])} for name in sorted(graph)
        ],
    }
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{number}", "version": 1}
    return head | content


def _component(package: Distribution) -> Json:
    name = str(package.metadata["Name"])
    ref = f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{package.version.replace('+', '%2B')}"
    about: Json = {"type": "library", "bom-ref": ref, "name": name, "version": package.version, "purl": ref}
    expression = package.metadata.get("License-Expression")
    classifiers = [
        c.split(" :: ")[-1] for c in package.metadata.get_all("Classifier", []) if c.startswith("License ::")
    ]
    text = (package.metadata.get("License") or "").strip()
    if expression:
        about["licenses"] = [{"expression": expression}]
    elif classifiers or text:
        about["licenses"] = [{"license": {"name": each}} for each in classifiers or text.splitlines()[:1]]
    return about


def audit(report: Json) -> tuple[list[str], str]:
    """The vulnerabilities in a report of pip-audit, and what was compared."""
    packages = report["dependencies"]
    known = [each for each in packages if "skip_reason" not in each]
    found = [
        f"{each['name']} {each['version']}: {vulnerability['id']}, fixed in "
        + (", ".join(vulnerability["fix_versions"]) or "no version")
        for each in known
        for vulnerability in each["vulns"]
    ]
    return found, f"{len(known)} of {len(packages)} packages compared; the registry has no data about the others"


def main(command: str, files: list[str]) -> int:
    if command == "sbom":
        print(json.dumps(sbom(map(Path, files)), indent=1))
        return 0
    report = sys.stdin.read()
    if not report.strip():
        print("not audited: pip-audit gave no report", file=sys.stderr)
        return 0
    found, compared = audit(json.loads(report))
    print("\n".join([*found, compared]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
