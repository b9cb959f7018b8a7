"""The bill of materials of a release, and the report about known vulnerabilities."""

import hashlib
from importlib.metadata import version
from pathlib import Path

from supply_chain import audit, dependencies, sbom


def test_the_bill_of_materials_lists_every_dependency(tmp_path: Path) -> None:
    wheel = tmp_path / "warpi.whl"
    wheel.write_bytes(b"content")
    bill = sbom([wheel])
    assert bill == sbom([wheel]), "the same release has the same bill"
    release = bill["metadata"]["component"]
    assert release["purl"] == f"pkg:pypi/warpi@{version('warpi')}"
    assert release["components"][0]["hashes"][0]["content"] == hashlib.sha256(b"content").hexdigest()
    parts = {part["name"]: part for part in bill["components"]}
    assert {"torch", "numpy", "scikit-learn", "safetensors", "pyarrow", "Jinja2", "MarkupSafe"} <= {*parts}
    assert all(part["version"] == version(name) and part["licenses"] for name, part in parts.items())
    refs = {release["bom-ref"], *(part["bom-ref"] for part in parts.values())}
    assert {each["ref"] for each in bill["dependencies"]} == refs
    assert all({*each["dependsOn"]} <= refs for each in bill["dependencies"])


def test_dependencies_of_dependencies() -> None:
    graph = dependencies("warpi", "")
    assert "MarkupSafe" in graph["Jinja2"]
    assert "matplotlib" not in graph
    assert "matplotlib" in dependencies("warpi", "report")


def test_vulnerabilities_are_named_and_packages_without_data_are_counted() -> None:
    vulnerable = {"name": "a", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"]}]}
    others = [{"name": "b", "version": "1", "vulns": []}, {"name": "c", "skip_reason": "not found"}]
    found, compared = audit({"dependencies": [vulnerable, *others]})
    assert found == ["a 1.0: PYSEC-1, fixed in 1.1, 2.0"]
    assert compared.startswith("2 of 3 packages compared")
    assert audit({"dependencies": others})[0] == []
