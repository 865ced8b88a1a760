"""Run tests/clients with each library that agents are written with, in an environment of its own: they ask for versions that exclude one another.

    python tools/run_clients.py [names]

An environment sees, behind its own packages, those of the one that runs this: the server is Paceline as it is here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = {
    "langchain": ["langchain-openai==1.7.3", "langchain-tests==1.1.9", "pytest-asyncio==1.5.0"],
    "pydantic_ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "instructor": ["instructor==1.17.0"],
    "litellm": ["litellm==1.106.2", "mcp==2.3.0"],
    "llm": ["llm==0.36"],
    "openai_agents": ["openai-agents==0.24.0"],
    "aider": ["aider-chat==0.86.2"],
}
"""What is installed for each. The name stands in its tests' names."""


def run(name: str, requirements: list[str]) -> int:
    folder = ROOT / "build" / "clients" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements], check=True)
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
    )
    Path(own.stdout.strip(), "paceline-tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'src'}\n")
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.call(
        [python, "-m", "pytest", "-q", "-rs", "-W", "ignore", "-p", "no:cacheprovider", "tests/clients", "-k", f"test_{name}"],
        cwd=ROOT,
        env=environment,
    )


if __name__ == "__main__":
    sys.exit(max(run(name, CLIENTS[name]) for name in (sys.argv[1:] or CLIENTS)))
