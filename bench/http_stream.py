"""What HTTP costs: sixteen streaming clients of `paceline up`, against the same engine stepped without a server.

Both get the same lengths and prompts that never repeat; they take turns, each suspended while the other runs. Compared are all tokens
over the wall time from the first request to the last stream's end. The clients are one process of their own on the same processors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from contender import Contender, kinds
from endpoint import Endpoint
from engines.worker import Job
from paceline.machine.speed import PromptMaker, Spread, Timing
from paceline.store.catalog import open_model
from quiet import Patience, least_disturbed, prefer

CLIENT_S = 400.0


def through_http(endpoint: Endpoint, model: str, prompts: Sequence[tuple[int, ...]], answer_tokens: int, nice: int) -> dict[str, Any]:
    """One run of the clients.

    Raises:
        RuntimeError: an answer had another length than asked for.
    """
    bodies = [
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt in prompts
    ]
    job = json.dumps({"port": endpoint.port, "bodies": bodies})
    client = [sys.executable, str(Path(__file__).parent / "http_client.py")]
    with subprocess.Popen(client, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        prefer(process.pid, nice)
        answer, _ = process.communicate(job + "\n", CLIENT_S)
    if process.returncode != 0:
        raise RuntimeError(f"the clients ended with code {process.returncode}")
    run = json.loads(answer)
    tokens = [stream["tokens"] for stream in run["streams"]]
    if tokens != [answer_tokens] * len(prompts):
        raise RuntimeError(f"asked for {answer_tokens} tokens each, got {tokens}")
    wall_s = max(stream["ended_s"] for stream in run["streams"]) - run["started_s"]
    waits = [stream["events_s"][0] - run["started_s"] for stream in run["streams"]]
    gaps = [after - before for stream in run["streams"] for before, after in zip(stream["events_s"], stream["events_s"][1:], strict=False)]
    return {"aggregate_per_s": sum(tokens) / wall_s, "waits": waits, "gaps": gaps}


def main() -> int:
    options = _options()
    options.logs.mkdir(parents=True, exist_ok=True)
    opened = open_model(options.model)
    prompts = PromptMaker(opened.tokenizer)
    context = -(-(options.prompt + options.answer) // 16) * 16
    kind = kinds(Path(), options.threads)["paceline"]
    contender = Contender(
        kind, Job(options.model, "", options.threads, options.clients, context), options.logs / "paceline.log", options.nice
    )
    limits = ["--threads", str(options.threads), "--max-running", str(options.clients), "--context", str(context)]
    endpoint: Endpoint | None = None
    try:
        endpoint = Endpoint(
            "--model", options.model, *limits, "--kv-tokens", str(options.clients * context), log=options.logs / "up.log", nice=options.nice
        )
        patience = Patience(options.patience, options.disturbance)
        http: list[tuple[dict[str, Any], float | None]] = []
        engine: list[tuple[Timing, float | None]] = []

        def over_http() -> dict[str, Any]:
            return through_http(endpoint, opened.name, prompts.make(options.clients, options.prompt), options.answer, options.nice)

        def stepped() -> Timing:
            return contender.run(prompts.make(options.clients, options.prompt), options.answer)

        # The first turn of each warms it up and is not counted.
        for turn in range(options.rounds + 1):
            print(f"round {turn} of {options.rounds}" if turn else "warm-up", file=sys.stderr)
            http.append(least_disturbed(over_http, endpoint.pid, patience) if turn else (over_http(), None))
            endpoint.pause()
            contender.resume()
            engine.append(least_disturbed(stepped, contender.pid, patience) if turn else (stepped(), None))
            contender.pause()
            endpoint.resume()
        del http[0], engine[0]
    finally:
        contender.kill()
        if endpoint is not None:
            endpoint.close()
    with_http = median(run["aggregate_per_s"] for run, _ in http)
    without = median(timing.aggregate_per_s for timing, _ in engine)
    report = {
        "clients": options.clients,
        "http_per_s": with_http,
        "engine_per_s": without,
        "ratio": with_http / without,
        "at_least": 0.85,
        "reach_for": 0.95,
        "rounds": [run["aggregate_per_s"] / timing.aggregate_per_s for (run, _), (timing, _) in zip(http, engine, strict=True)],
        "bystanders": [[with_it, without_it] for (_, with_it), (_, without_it) in zip(http, engine, strict=True)],
        "first_token": asdict(Spread.of([wait for run, _ in http for wait in run["waits"]])),
        "between_events": asdict(Spread.of([gap for run, _ in http for gap in run["gaps"]])),
    }
    print(json.dumps(report, indent=2))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that may be spent, in all, waiting for a quiet machine")
    parser.add_argument("--nice", type=int, default=0, help="priority of all engines alike; below 0 needs privileges")
    parser.add_argument("--disturbance", type=float, default=0.04, help="share of the machine others may take in a clean measurement")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "paceline-bench" / "logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
