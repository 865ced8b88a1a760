"""Count what the prose of src breaks of CONTRIBUTING.md's rules, by package. The counts in tools/prose_counts.json may only fall.

    python -m tools.lint_prose [--keep] [PATH ...]

--keep writes the counts of today. With paths, each violation in these files is printed. As information, the lines added to and removed from each
package are printed: since the merge base with main, or since the commit before where this is main.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "paceline"
COUNTS = ROOT / "tools" / "prose_counts.json"
BEGINNINGS = frozenset(["Of", "What", "Who", "Whom", "Whose", "Those", "Likewise", "As", "That", "Whether"])
PERSONS = re.compile(r"\b(who|whose|somebody|someone)\b", re.IGNORECASE)
"""For a machine, a request or a piece of code. A user is a person: "who" is allowed in a sentence that names a person or a user."""
PEOPLE = re.compile(r"\b(person|people|user|owner|reader|client)s?\b", re.IGNORECASE)


class Violation(NamedTuple):
    """A line that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str


def words() -> re.Pattern[str]:
    """Return the expression of prose_words.txt."""
    lines = (ROOT / "tools" / "prose_words.txt").read_text().splitlines()
    return re.compile(r"\b(" + "|".join(re.escape(line) for line in lines if line and not line.startswith("#")) + r")\b", re.IGNORECASE)


def prose(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield the docstrings and comments of a file: line, text, and whether it is a docstring."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
                yield each.lineno, each.value.value, True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|pyright|fmt|isort|-{3})", token.string):
            yield token.start[0], token.string.lstrip("# "), False


def violations(path: Path, banned: re.Pattern[str]) -> Iterator[Violation]:
    """Yield what a file breaks: rule 1 (how a docstring begins), 2 (persons) and 3 (words)."""
    for line, text, is_docstring in prose(path):
        first = re.match(r"\W*(\w+)", text)
        if is_docstring and first and first[1] in BEGINNINGS:
            yield Violation(path, line, "1 beginning", first[1])
        for sentence in re.split(r"(?<=[.;:])\s", text):
            if (person := PERSONS.search(sentence)) and not PEOPLE.search(sentence):
                yield Violation(path, line, "2 person", person[1])
        for word in banned.finditer(text):
            yield Violation(path, line, "3 word", word[1])


def package_of(path: Path) -> str:
    """Return the package that a file of src is counted with."""
    first, *rest = path.relative_to(SOURCE).parts
    return first if rest else "paceline"


def count() -> dict[str, int]:
    """Return the violations of each package."""
    banned, found = words(), Counter[str]()
    for path in sorted(SOURCE.rglob("*.py")):
        if "_pb2" not in path.name:
            found[package_of(path)] += sum(1 for _ in violations(path, banned))
    return dict(sorted(found.items()))


def lines_changed() -> None:
    """Print the lines added and removed, by package; nothing where there is no git."""
    if shutil.which("git") is None:
        return

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607 - as a person finds it
        return done.stdout.strip()

    head = git("rev-parse", "HEAD")
    bases = [git("merge-base", "HEAD", ref) for ref in ("origin/main", "main")]
    base = next((each for each in bases if each not in {"", head}), "HEAD~1")
    rows = [line.split("\t") for line in git("diff", "--numstat", base, "--", "src", "tests").splitlines()]
    added, removed = Counter[str](), Counter[str]()
    for plus, minus, name in rows:
        if name.endswith(".py") and "_pb2" not in name:
            parts = name.replace("{", "").split("/")
            package = "tests" if parts[0] == "tests" else parts[2] if len(parts) > 3 else "paceline"
            added[package] += int(plus)
            removed[package] += int(minus)
    print(f"lines since {base[:8]}: " + ", ".join(f"{name} +{added[name]} -{removed[name]}" for name in sorted(added)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("paths", nargs="*", type=Path)
    chosen = parser.parse_args()
    if chosen.paths:
        banned = words()
        found = [
            each
            for path in chosen.paths
            for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
            for each in violations(file, banned)
        ]
        for path, line, rule, text in found:
            print(f"{path}:{line}: {rule}: {text}")
        return 1 if found else 0
    now, before = count(), json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if chosen.keep:
        COUNTS.write_text(json.dumps(now, indent=1) + "\n")
    lines_changed()
    risen = {name: (before.get(name, 0), n) for name, n in now.items() if n > before.get(name, 0)} if not chosen.keep else {}
    print(f"prose: {sum(now.values())} violations; " + ", ".join(f"{name} {n}" for name, n in now.items()))
    for name, (was, is_) in risen.items():
        print(f"{name}: {is_} violations, {was} before. `python -m tools.lint_prose src/paceline/{name}` lists them.", file=sys.stderr)
    if not risen and sum(now.values()) < sum(before.values()):
        print("It fell: keep the new counts with `python -m tools.lint_prose --keep`")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
