"""Writes SPDX 2.3 documents, which say what a file is made of: https://spdx.github.io/spdx-spec/v2.3/.

setup.py runs this file by its path, so it imports nothing but Python's own library.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

_UNKNOWN = "NOASSERTION"


@dataclass(frozen=True)
class Component:
    """A part of a file, or what it was made with, with SPDX's primary purpose and an SPDX expression as its license.

    SPDX calls it a package. Its files would need SHA-1, which nothing here has. `relation` is what it is to the whole,
    a relationship of SPDX.
    """

    name: str
    version: str | None = None
    sha256: str | None = None
    file: str | None = None
    purpose: str = "LIBRARY"
    pypi: bool = False
    license: str | None = None
    comment: str | None = None
    relation: str = "CONTAINED_BY"


def document(whole: Component, parts: Sequence[Component], *, tool: str, identity: str) -> bytes:
    """Returns a document in JSON: the same bytes for the same arguments, if SOURCE_DATE_EPOCH gives the time.

    It describes the whole, and its parts: what is in it, what it needs, and what it was made with. `identity` is what
    no other document has, such as a digest; it becomes part of the document's address.
    """
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    created = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(int(seconds), UTC)
    named = [("SPDXRef-whole", whole), *((f"SPDXRef-part-{i}", part) for i, part in enumerate(parts))]
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-whole")]
    relations += [(name, part.relation, "SPDXRef-whole") for name, part in named[1:]]
    content = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": whole.file or whole.name,
        "documentNamespace": f"https://spdx.org/spdxdocs/{_plain(whole.name)}-{_plain(identity)}",
        "creationInfo": {"created": created.strftime("%Y-%m-%dT%H:%M:%SZ"), "creators": [f"Tool: {tool}"]},
        "packages": [_package(name, part) for name, part in named],
        "relationships": [
            {"spdxElementId": element, "relationshipType": kind, "relatedSpdxElement": other}
            for element, kind, other in relations
        ],
    }
    return json.dumps(content, indent=1).encode() + b"\n"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)


def _package(identifier: str, part: Component) -> dict[str, object]:
    package: dict[str, object] = {
        "SPDXID": identifier,
        "name": part.name,
        "downloadLocation": _UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": _UNKNOWN,
        "licenseDeclared": part.license or _UNKNOWN,
        "copyrightText": _UNKNOWN,
        "primaryPackagePurpose": part.purpose,
    }
    if part.version is not None:
        package["versionInfo"] = part.version
    if part.file is not None:
        package["packageFileName"] = part.file
    if part.sha256 is not None:
        package["checksums"] = [{"algorithm": "SHA256", "checksumValue": part.sha256}]
    if part.comment is not None:
        package["comment"] = part.comment
    if part.pypi:
        name = re.sub(r"[-_.]+", "-", part.name).lower()
        # A local version such as +cpu is of no index; a plus sign is written as an escape.
        locator = f"pkg:pypi/{name}" + (f"@{part.version.replace('+', '%2B')}" if part.version else "")
        reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": locator}
        package["externalRefs"] = [reference]
    return package
