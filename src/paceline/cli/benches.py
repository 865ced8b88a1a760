"""`paceline bench` and what is below it: this machine, drafts, a pipeline, a pipeline that breaks."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import AnswerTokens, AsJson, Device, Model, OwnLayers, Pins, PromptTokens, Rounds, Threads, Weights
from paceline.machine.settings import DEFAULT_MODEL, NodeSettings
from paceline.machine.timing import Sampled
from paceline.net.member.settings import DEFAULT_PRESET

app = typer.Typer(
    name="bench",
    help="Measure how fast this machine, or a pipeline of several, runs a model.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Streams = Annotated[str, typer.Option("--streams", help="Answers side by side, measured one after the other.")]


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    prompt_tokens: PromptTokens = 128,
    answer_tokens: AnswerTokens = 128,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Answers side by side, measured one after the other.")] = "1,4,16",
    rounds: Rounds = 3,
    sampling: Annotated[
        Sampled,
        typer.Option(
            "--sampling", help="How tokens are drawn; default is temperature 1, as the API's, qwen3 0.7 with top-p 0.8 and top-k 20."
        ),
    ] = Sampled.DEFAULT,
    weights: Weights = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine runs a model."""
    if context.invoked_subcommand is not None:
        return
    from paceline.cli.bench import run_benchmark

    settings = NodeSettings(model, weights, device=device, threads=threads)
    run_benchmark(
        settings,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        concurrency=concurrency,
        rounds=rounds,
        sampling=sampling,
        as_json=as_json,
    )


@app.command()
def speculate(
    model: Model = DEFAULT_MODEL,
    draft: Annotated[
        str,
        typer.Option(
            "--draft", metavar="auto|ngram|MODEL", help="Compared with none: prompt lookup, or a model on this machine, or jacobi:MODEL."
        ),
    ] = "auto",
    kinds: Annotated[str, typer.Option("--kinds", help="Of code-edit, agent, summary, prose: those to measure. Default: all.")] = "",
    streams: Streams = "1,16",
    answer_tokens: Annotated[int, typer.Option("--answer", min=2, help="Tokens of the model's own answers, at most.")] = 128,
    rounds: Rounds = 2,
    weights: Weights = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure what drafts gain, on texts that ship with Paceline, and compare every byte."""
    from paceline.cli.bench import bench_speculate

    settings = NodeSettings(model, weights, device=device, threads=threads)
    bench_speculate(settings, draft=draft, kinds=kinds, batches=streams, answer_tokens=answer_tokens, rounds=rounds, as_json=as_json)


@app.command()
def pipeline(
    model: Model = DEFAULT_MODEL,
    local_nodes: Annotated[
        int, typer.Option("--local-nodes", min=1, max=16, help="Over so many nodes on this machine. 1: over the fleet's.")
    ] = 1,
    prompt_tokens: PromptTokens = 128,
    answer_tokens: AnswerTokens = 128,
    streams: Streams = "1,16",
    rounds: Rounds = 3,
    weights: Weights = None,
    device: Device = None,
    threads: Threads = None,
    pin: Pins = None,
    own_layers: OwnLayers = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help="host:port of a machine of the fleet, in place of looking for them. May be repeated.")
    ] = None,
    fleet_preset: Annotated[str, typer.Option("--fleet-preset", envvar="PACELINE_FLEET_PRESET", help="As of the fleet.")] = DEFAULT_PRESET,
    as_json: AsJson = False,
) -> None:
    """Measure one model over several machines, beside this one alone."""
    from paceline.cli.bench import bench_pipeline

    settings = NodeSettings(model, weights, device=device, threads=threads)
    bench_pipeline(
        settings,
        local_nodes=local_nodes,
        lengths=(prompt_tokens, answer_tokens),
        streams=streams,
        rounds=rounds,
        pins=tuple(pin or ()),
        own_layers=own_layers,
        peers=tuple(peer or ()),
        preset=fleet_preset,
        as_json=as_json,
    )


@app.command()
def fault(
    kill: Annotated[
        str, typer.Option("--kill", help="Who dies: a node, or stage:1, stage:2 and so on. Stage 0 is this process.")
    ] = "stage:1",
    at: Annotated[int, typer.Option("--at", min=1, help="Token of the first answer at which it dies.")] = 64,
    model: Model = DEFAULT_MODEL,
    local_nodes: Annotated[int, typer.Option("--local-nodes", min=2, max=16, help="Nodes on this machine, this process included.")] = 3,
    spare: Annotated[bool, typer.Option("--spare/--no-spare", help="One of the nodes has the layers and waits.")] = True,
    prompt_tokens: PromptTokens = 128,
    answer_tokens: AnswerTokens = 128,
    streams: Streams = "1,16",
    weights: Weights = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Kill a machine of a pipeline while answers stream: the gap, what is computed again, and whether the bytes match."""
    from paceline.cli.bench import bench_fault

    settings = NodeSettings(model, weights, device=device, threads=threads)
    bench_fault(
        settings,
        kill=kill,
        at=at,
        local_nodes=local_nodes,
        spare=spare,
        lengths=(prompt_tokens, answer_tokens),
        streams=streams,
        as_json=as_json,
    )
