"""How long `paceline up` takes from its start to the first token of its first answer, and to that answer's end, with caches warm.

The first start fills the caches and is reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from endpoint import Endpoint

QUESTION = "What is a paceline?"


def start(model: str, log: Path) -> dict[str, float]:
    """Start, ask, end."""
    endpoint = Endpoint("--model", model, log=log)
    try:
        ready_s = time.perf_counter() - endpoint.began_s
        url = f"http://127.0.0.1:{endpoint.port}/v1"
        first_s: float | None = None
        with httpx.Client(timeout=60, trust_env=False) as client:
            name = client.get(f"{url}/models").json()["data"][0]["id"]
            messages = [{"role": "user", "content": QUESTION}]
            body: dict[str, Any] = {"model": name, "messages": messages, "stream": True, "max_tokens": 16, "temperature": 0}
            with client.stream("POST", f"{url}/chat/completions", json=body) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if first_s is None and line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                        first_s = time.perf_counter() - endpoint.began_s
        if first_s is None:
            raise RuntimeError("the answer was empty")
        return {"ready_s": ready_s, "first_token_s": first_s, "answer_s": time.perf_counter() - endpoint.began_s}
    finally:
        endpoint.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "paceline-bench" / "logs")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    first, *warm = [start(options.model, options.logs / "up.log") for _ in range(options.rounds + 1)]
    seconds = median(each["answer_s"] for each in warm)
    report = {
        "seconds_to_first_answer": seconds,
        "at_most": 6.0,
        "reach_for": 3.0,
        "ratio_to_limit": seconds / 6.0,
        "rounds": warm,
        "first_start": first,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
