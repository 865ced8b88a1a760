"""Modules that a start of a machine in no fleet, and commands that only look, do not import. Each takes a twentieth of a second or more."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.backends import cpu

START = (
    "paceline.cli.sharing",
    "paceline.cli.up",
    "paceline.machine.devices",
    "paceline.machine.models",
    "paceline.node.build",
    "paceline.node.ways",
    "paceline.server.app",
    "paceline.server.serve",
    "paceline.store.catalog",
)
"""What `paceline up` imports before it loads a model."""
LATER = (
    "anthropic",
    "cryptography",  # for --tls and members of a fleet
    "fastapi",  # writes /openapi.json
    "google.protobuf",
    "grpc",
    "httpx",  # commands that ask an endpoint
    "huggingface_hub",
    "openai",
    "paceline.net.channels",
    "paceline.net.member.node",
    "paceline.ways.draft.sources",
    "paceline.ways.kv.source",
    "paceline.ways.pipeline.routes.build",
    "pydantic.v1",
    "torch",
    "transformers",
)
BUILDS = (
    *("anthropic", "fastapi", "huggingface_hub", "jinja2", "llguidance", "numba", "openai", "tokenizers", "torch", "transformers"),
    *("paceline.engine.engine", "paceline.machine.setup", "paceline.net.member.node", "paceline.store.catalog"),
    "paceline.ways.pipeline.routes.build",
)
"""Modules of servers and models, which no command needs that only looks."""
LOOKS = {
    "status of a machine alone": ("paceline.cli.status", ("cryptography", "grpc", "httpx", "numpy", "prometheus_client", "pydantic"), 300),
    "status of a fleet": ("paceline.cli.fleet_status", ("httpx", "numpy", "pydantic"), 530),
    "status with plans": ("paceline.cli.fleet_status, paceline.node.ways", ("httpx", "pydantic"), 650),
    "ps": ("paceline.cli.loaded", ("cryptography", "grpc", "numpy", "pydantic"), 400),
    "plan": ("paceline.cli.plan", ("cryptography", "grpc", "pydantic"), 530),
}
"""For each command: its modules, what it does not import in addition to `BUILDS`, and the most modules that it imports."""
COMPILING = ("cffi", "numba.core.inline_closurecall", "pycparser")
"""Numba imports these to compile; reading compiled kernels takes none of them."""
LOAD = """
from paceline.backends import cpu
from paceline.backends.numerics import SeededWeights
from paceline.backends.options import LoadOptions
from paceline.core.model import ModelSpec, RopeSpec, WeightsFormat
from paceline.store.home import Home

spec = ModelSpec("llama", 1, 96, 6, 2, 32, 160, 307, 512, 1e-5, RopeSpec(1e4), tied_head=True)
cpu.load(SeededWeights(spec), LoadOptions(spec.all_layers, WeightsFormat.BF16, 2, threads=2, kernel_cache=Home.from_environment().kernels))
"""


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True, timeout=300
    )
    return set(done.stdout.split())


def test_a_start_imports_nothing_that_only_fleets_and_documents_need() -> None:
    assert imported(f"import {', '.join(START)}") & set(LATER) == set()


@pytest.mark.parametrize(("modules", "others", "most"), LOOKS.values(), ids=LOOKS)
def test_a_command_that_looks_imports_nothing_that_builds(modules: str, others: tuple[str, ...], most: int) -> None:
    found = imported(f"import {modules}")
    assert found & {*BUILDS, *others} == set()
    assert len(found) <= most


@pytest.mark.parametrize(
    "api", ["requests.ChatCompletionRequest", "responses.requests.ResponsesRequest", "anthropic.requests.MessagesRequest"]
)
def test_what_checks_requests_is_built_by_the_first_one(api: str) -> None:
    module, _, name = f"paceline.server.{api}".rpartition(".")
    assert imported(f"import {', '.join(START)}\nfrom {module} import {name}\nassert not {name}.__pydantic_complete__")


@pytest.mark.skipif(not cpu.runs_here(), reason="this processor has no AVX2")
def test_reading_compiled_kernels_imports_nothing_that_compiles() -> None:
    imported(LOAD)  # which compiles what is missing
    assert imported(LOAD) & set(COMPILING) == set()
