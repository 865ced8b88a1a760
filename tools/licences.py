"""Write THIRD_PARTY.md: the packages that Paceline installs, and their licences. With --check: write nothing, and fail where it is out of date.

Either way a licence outside of `ALLOWED` fails. A package that this system does not install keeps its line.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import PackageMetadata, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTICES = ROOT / "THIRD_PARTY.md"
REQUIREMENTS = ("install", "torch", "ring", "nixl")
ALLOWED = frozenset(
    {
        *(
            "0BSD",
            "Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
            "BSD-2-Clause",
            "BSD-3-Clause",
            "BSL-1.0",
            "CC0-1.0",
            "ISC",
            "MIT",
            "MIT-0",
            "PSF-2.0",
            "Zlib",
        ),
        *("LGPL-2.1-or-later", "MPL-2.0"),  # of libraries that are used unchanged
    }
)
SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""Names in older metadata, and what SPDX calls them."""
ABSENT = {"colorama": "BSD-3-Clause", "httpx2-jsfetch": "BSD-3-Clause", "mlx-metal": "MIT"}
"""Licences of packages that only other systems install, from their pages in the package index."""


def licence_of(metadata: PackageMetadata) -> str:
    """Return a package's licence as an SPDX expression."""
    said: list[str] = metadata.get_all("Classifier") or []
    classifiers = [each.rpartition(" :: ")[2] for each in said if each.startswith("License :: ") and each != "License :: OSI Approved"]
    found = metadata["License-Expression"] or (metadata["License"] or "").strip()
    if not found or "\n" in found:
        found = " OR ".join(classifiers)
    return " OR ".join(SPELLINGS.get(part, part) for part in found.split(" OR "))


def is_allowed(expression: str) -> bool:
    """Return whether every part of an expression is allowed; of alternatives (OR) one suffices."""
    bare = re.sub(r"\(([^()]+ OR [^()]+)\)", lambda found: "MIT" if is_allowed(found[1]) else "refused", expression)
    if " AND " in bare:
        return all(is_allowed(part) for part in bare.split(" AND "))
    return any(part in ALLOWED for part in bare.split(" OR "))


def packages() -> dict[str, str]:
    """Return the licence of each package that `make install` may install."""
    text = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in REQUIREMENTS)
    found = dict[str, str]()
    for name in sorted({*re.findall(r"^([A-Za-z0-9._-]+)==", text, re.MULTILINE), "torch"}):
        try:
            found[name] = licence_of(distribution(name).metadata)
        except PackageNotFoundError:
            found[name] = ABSENT.get(name, "")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    found = packages()
    before = NOTICES.read_text() if NOTICES.exists() else ""
    kept = dict(re.findall(r"^\| (\S+) \| ([^|]+) \|$", before, re.MULTILINE))
    found = {name: licence or kept.get(name, "") for name, licence in found.items()}
    refused = {name: licence for name, licence in found.items() if not is_allowed(licence)}
    for name, licence in refused.items():
        print(f"{name}: {licence or 'no licence is known'}. Allowed are those in tools/licences.py.", file=sys.stderr)
    lines = [
        "# Third-party packages",
        "",
        "Paceline installs these packages; it copies none of their source. `python tools/licences.py` writes this page.",
        "",
        "| package | licence |",
        "|---|---|",
        *(f"| {name} | {licence} |" for name, licence in found.items()),
        "",
        "The bundled model, SmolLM2-135M-Instruct, is licensed under Apache-2.0 by Hugging Face.",
    ]
    after = "\n".join(lines) + "\n"
    if chosen.check and after != before:
        print("THIRD_PARTY.md is out of date. Run: python tools/licences.py", file=sys.stderr)
        return 1
    if not chosen.check:
        NOTICES.write_text(after)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
