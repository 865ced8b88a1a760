"""`paceline bench` and what is below it: this machine, drafts, a pipeline, a pipeline that breaks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Annotated

import typer

from paceline.cli.options import (
    AnswerTokens,
    AsJson,
    Device,
    Model,
    OwnLayers,
    Pins,
    PromptTokens,
    Rounds,
    Streams,
    Tensor,
    Threads,
    Weights,
    tensor_nodes,
    tensor_speeds,
)
from paceline.fleet.presets import DEFAULT_PRESET
from paceline.machine.settings import DEFAULT_MODEL, NodeSettings, Sampled

app = typer.Typer(
    name="bench",
    help="Measure how fast this machine, or a pipeline of several, runs a model.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    tensor: Tensor = "1",
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine runs a model."""
    if context.invoked_subcommand is not None:
        return
    from paceline.bench.engine import BenchPlan, run_bench
    from paceline.cli.bench import counts, print_report, show, telling

    settings = NodeSettings(model, weights, device=device, threads=threads, tensor=tensor_speeds(tensor), tensor_on=tensor_nodes(tensor))
    plan = BenchPlan(prompt_tokens, answer_tokens, counts("--concurrency", concurrency), rounds=rounds, sampling=sampling)
    with telling() as tell:
        report = run_bench(settings, plan, tell)
    print_report(report, show, as_json=as_json)


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
    from paceline.bench.drafts import DraftBenchPlan, run_draft_bench
    from paceline.cli.bench import counts, exercise_kinds, print_report, show_speculate, telling
    from paceline.core.clock import SystemClock

    settings = NodeSettings(model, weights, device=device, threads=threads)
    batches = counts("--streams", streams)
    plan = DraftBenchPlan(draft, kinds=exercise_kinds(kinds), batches=batches, answer_tokens=answer_tokens, rounds=rounds)
    with telling() as tell:
        report = run_draft_bench(settings, plan, SystemClock(), tell)
    print_report(report, show_speculate, as_json=as_json)


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
    from paceline.bench.fleet import BenchNode
    from paceline.bench.pipeline import PipelineBenchPlan, run_pipeline_bench
    from paceline.cli.bench import as_configured, counts, local_fleet, print_report, show_pipeline, telling
    from paceline.cli.sharing import fleet_settings
    from paceline.core.clock import SystemClock
    from paceline.core.ids import NodeId
    from paceline.fleet.plan import Objective, Pin
    from paceline.node.ways import parse_pin
    from paceline.store.home import Home
    from paceline.ways.pipeline.order import PipelineOrder

    settings = NodeSettings(model, weights, device=device, threads=threads)
    plan = PipelineBenchPlan(prompt_tokens, answer_tokens, counts("--streams", streams), rounds)
    plan.check()
    pins, clock = tuple(map(parse_pin, pin or ())), SystemClock()
    with telling() as tell:
        if local_nodes == 1:
            fleet = fleet_settings(0, "", peer or (), fleet_preset, mdns=not peer, needed=True)
            assert fleet is not None, "it is needed"
            with closing(BenchNode(fleet, Home.from_environment(), clock)) as node:
                report = run_pipeline_bench(node, settings, PipelineOrder(as_configured(), pins, own_layers, exact=True), plan, clock, tell)
        else:
            with local_fleet(local_nodes, settings) as (local, node):
                settings = replace(settings, threads=local.threads)
                pins = pins or tuple(Pin(NodeId(name)) for name in local.names)
                order = PipelineOrder(as_configured(), pins, own_layers, Objective.THROUGHPUT, exact=True)
                report = run_pipeline_bench(node, settings, order, plan, clock, tell)
    print_report(report, show_pipeline, as_json=as_json)


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
    from paceline.bench.fault import FaultPlan, run_fault_bench
    from paceline.cli.bench import as_configured, counts, local_fleet, print_report, show_fault, telling
    from paceline.core.clock import SystemClock

    settings = NodeSettings(model, weights, device=device, threads=threads)
    plan = FaultPlan(kill, at, prompt_tokens, answer_tokens, counts("--streams", streams), spare)
    plan.check(local_nodes)
    with telling() as tell, local_fleet(local_nodes, settings) as (local, node):
        settings = replace(settings, threads=local.threads)
        report = run_fault_bench(node, local, settings, as_configured(), plan, SystemClock(), tell)
    print_report(report, show_fault, as_json=as_json)
