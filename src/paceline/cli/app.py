"""Commands and their options. Each command's work is in a module of its own, imported when it runs, so that help is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline import __version__
from paceline.backends.memory import GIB
from paceline.cli import benches, enrolment, hostfile, service, share
from paceline.cli.logs import write_log
from paceline.cli.options import (
    OWN_LAYERS_HELP,
    PIN_HELP,
    PORTS,
    ApiKeyFile,
    AsJson,
    Commands,
    Context,
    Device,
    Draft,
    Exact,
    KvDisk,
    KvTokens,
    MaxRunning,
    PinDraft,
    Pins,
    PrefillChunk,
    Role,
    StepBudgetMs,
    Tensor,
    Threads,
    Weights,
    disk_size,
    of_drafts,
    of_fleet,
    of_model,
    of_pipeline,
    of_server,
    tensor_nodes,
    tensor_speeds,
    up_params,
)
from paceline.cli.terminal import EXIT_FAILED, EXIT_USER, discard, report
from paceline.core.errors import ConfigError, PacelineError, UserError
from paceline.core.ids import NodeId
from paceline.fleet.presets import DEFAULT_PRESET, FLEET_PORT, PRESETS
from paceline.machine.settings import DEFAULT_MODEL, NodeSettings

app = typer.Typer(
    name="paceline",
    cls=Commands,
    help="One OpenAI endpoint out of the machines you already own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def up(
    model: Annotated[
        list[str] | None,
        of_model(
            "--model",
            "-m",
            help=f"A model's name, a folder, or a GGUF file. May be repeated: the first answers who names none. Default: {DEFAULT_MODEL}.",
        ),
    ] = None,
    on_demand: Annotated[
        bool | None,
        of_model(
            "--on-demand/--no-on-demand",
            help="Load the models on this disk that requests name, and let idle ones make way. Default: on a machine in no fleet.",
        ),
    ] = None,
    models_memory: Annotated[
        float | None, of_model("--models-memory", metavar="GIB", help="For all models together. Default: what is free.")
    ] = None,
    served_name: Annotated[
        list[str] | None, of_server("--served-name", metavar="NAME", help="Another name for it, for clients. May be repeated.")
    ] = None,
    sampling_defaults: Annotated[
        Literal["model", "openai"],
        of_server("--sampling-defaults", help="Where a request does not say how to draw: as the model's files do, or OpenAI's API."),
    ] = "model",
    port: Annotated[int, of_server("--port", "-p", **PORTS, help="0: any free one.")] = 8000,
    host: Annotated[str, of_server("--host", help="Anything but loopback needs an API key.")] = "127.0.0.1",
    weights: Weights = None,
    api_key: Annotated[
        str | None,
        of_server(
            "--api-key",
            envvar="PACELINE_API_KEY",
            help="Asked of every client when set. Others on this machine can read a command's arguments: --api-key-file keeps it from them.",
        ),
    ] = None,
    api_key_file: ApiKeyFile = None,
    tls: Annotated[bool, of_server("--tls", help="Serve HTTPS, with a certificate that this machine makes for itself.")] = False,
    tls_cert: Annotated[Path | None, of_server("--tls-cert", help="Serve HTTPS with this certificate (PEM), and --tls-key.")] = None,
    tls_key: Annotated[Path | None, of_server("--tls-key", help="The key of --tls-cert (PEM).")] = None,
    allow_host: Annotated[
        list[str] | None, of_server("--allow-host", help="A name of this machine that clients use without a key. May be repeated.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        of_server("--allow-origin", help="Web pages that may use the API, like https://chat.example.org. May be repeated."),
    ] = None,
    keep_client_headers: Annotated[
        bool,
        of_server(
            "--keep-client-headers",
            help="Show the model the lines that clients put before a prompt and change every time: no prompt then begins as another.",
        ),
    ] = False,
    kv_tokens: KvTokens = None,
    kv_disk: KvDisk = None,
    role: Role = None,
    device: Device = None,
    threads: Threads = None,
    engine: Annotated[
        Literal["own", "llama", "vllm", "mlx"] | None,
        of_model(
            "--engine",
            help="What runs the model: Paceline's own kernels, llama-server, vLLM or mlx-lm. Default: the fastest here that can.",
        ),
    ] = None,
    tensor: Tensor = "1",
    max_running: MaxRunning = 32,
    prefill_chunk: PrefillChunk = 512,
    step_budget_ms: StepBudgetMs = 250,
    context: Context = None,
    draft: Draft = "auto",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        of_server(
            "--log-level", metavar="LEVEL", help="debug, info, warning or error. info: a line for each request, not for refused ones only."
        ),
    ] = "warning",
    embeddings: Annotated[
        str | None,
        of_server(
            "--embeddings",
            metavar="MODEL",
            help="Serve /v1/embeddings with this encoder, a BERT, beside the model, or with --no-model alone.",
        ),
    ] = None,
    greet: Annotated[bool, of_server("--greet", help="Answer one question through the endpoint once it is up.")] = False,
    engines: Annotated[
        Literal["ask", "auto", "off"],
        of_server(
            "--engines", help="Engines of other makers that run on this machine: ask whether to offer them, offer yours, or don't look."
        ),
    ] = "ask",
    no_model: Annotated[bool, of_fleet("--no-model", help="Load none: serve what other machines of the fleet have.")] = False,
    fleet_port: Annotated[int, of_fleet("--fleet-port", **PORTS, help="For the fleet's machines. 0: any free one.")] = FLEET_PORT,
    tensor_port: Annotated[
        int | None, of_fleet("--tensor-port", **PORTS, help="For what crosses between machines that share a model. 0: any free one.")
    ] = None,
    fleet_host: Annotated[str, of_fleet("--fleet-host", help="Address for the fleet's machines. Default: all of this one's.")] = "",
    peer: Annotated[list[str] | None, of_fleet("--peer", help="host:port of a machine of the fleet. May be repeated.")] = None,
    no_mdns: Annotated[bool, of_fleet("--no-mdns", help="Neither look for others on this network, nor be found there.")] = False,
    max_revocation_age: Annotated[
        str | None,
        of_fleet("--max-revocation-age", help="Refuse other machines while it is longer since this one heard who was revoked: 30d."),
    ] = None,
    fleet_preset: Annotated[
        str, of_fleet("--fleet-preset", envvar="PACELINE_FLEET_PRESET", help=f"{', '.join(PRESETS)}: the same on all machines.")
    ] = DEFAULT_PRESET,
    pipeline: Annotated[
        bool | None, of_pipeline("--pipeline/--no-pipeline", help="Run the model over several machines, as the plan says.")
    ] = None,
    serve_shards: Annotated[
        bool | None, of_pipeline("--serve-shards/--no-serve-shards", help="Run layers of models for other machines of the fleet.")
    ] = None,
    fallback_to_local: Annotated[
        bool | None,
        of_pipeline("--fallback-to-local/--no-fallback-to-local", help="Go on alone when a pipeline has no machines left."),
    ] = None,
    exact: Exact = None,
    ways: Annotated[
        str,
        of_fleet(
            "--ways",
            metavar="WAY,...",
            help="Of alone, draft, pipeline, tensor: those that the plan may choose of. Default: all that fit the other options.",
        ),
    ] = "",
    pin: Annotated[list[str] | None, of_pipeline("--pin", help=PIN_HELP)] = None,
    own_layers: Annotated[int | None, of_pipeline("--own-layers", min=0, help=OWN_LAYERS_HELP)] = None,
    throughput: Annotated[bool, of_pipeline("--throughput", help="Plan a pipeline for many answers at once, not for one.")] = False,
    propose: Annotated[
        list[str] | None,
        of_drafts(
            "--propose", metavar="MODEL", help="Draft with it for the fleet's machines. jacobi:MODEL: whole blocks. May be repeated."
        ),
    ] = None,
    pin_draft: PinDraft = None,
    local_nodes: Annotated[
        int, of_pipeline("--local-nodes", min=1, max=16, help="Try it: a fleet of so many nodes on this machine, with a pipeline.")
    ] = 1,
    drain_s: Annotated[float, of_server("--drain-s", min=0, max=86_400, help="Seconds that live answers may go on at Ctrl-C.")] = 30.0,
    beside: Annotated[
        list[str] | None, typer.Option("--beside", hidden=True, help="A model that lies elsewhere, to run layers of for others.")
    ] = None,
    tied: Annotated[bool, typer.Option("--tied", hidden=True, help="Stop when standard input ends.")] = False,
) -> None:
    """Serve a model as an OpenAI endpoint; on a machine of a fleet, the whole fleet's."""
    from paceline.cli.options import ApiOptions, server_settings
    from paceline.cli.sharing import run_shared
    from paceline.cli.sharing_options import SharingOptions
    from paceline.engines.choice import Asked

    write_log(log_level.upper())
    first, *more = model or [DEFAULT_MODEL]
    if first in more or len(set(more)) < len(more):
        raise ConfigError("--model names a model twice", "Once is enough.")
    if no_model and model:
        raise ConfigError(f"--model {first} loads a model, and --no-model asked for none", "Leave one of them out.")
    if no_model and (draft != "auto" or pin_draft is not None):
        raise ConfigError("--draft needs a model on this machine, and --no-model loads none", "Give it where the model runs.")
    if no_model and served_name:
        why = "--served-name is another name for this machine's model, and with --no-model it has none"
        raise ConfigError(why, "Give it where the model runs.")
    settings = NodeSettings(
        first,
        weights,
        kv_tokens,
        context,
        device,
        threads,
        max_running,
        prefill_chunk,
        step_budget_ms,
        draft=draft,
        draft_on=None if pin_draft is None else NodeId(pin_draft),
        kv_disk_bytes=disk_size(kv_disk),
        tensor=tensor_speeds(tensor),
        tensor_on=tensor_nodes(tensor),
    )
    sharing = SharingOptions(
        fleet_port=fleet_port,
        tensor_port=tensor_port,
        fleet_host=fleet_host,
        peers=tuple(peer or ()),
        fleet_preset=fleet_preset,
        mdns=not no_mdns,
        pipeline=pipeline,
        serve_shards=serve_shards,
        fallback_to_local=fallback_to_local,
        pins=tuple(pin or ()),
        own_layers=own_layers,
        throughput=throughput,
        propose=tuple(propose or ()),
        local_nodes=local_nodes,
        tied=tied,
        beside=tuple(beside or ()),
        drain_s=drain_s,
        max_revocation_age=max_revocation_age,
        embeddings=embeddings,
        more=() if no_model else tuple(more),
        on_demand=on_demand,
        engines=engines,
        engine=None if engine is None else Asked(engine),
        memory_bytes=None if models_memory is None else int(models_memory * GIB),
        kv_disk_bytes=settings.kv_disk_bytes,
        ways=ways,
        exact=exact,
        role=role,
        threads=threads,
        device=device,
        tensor=(1.0,) if settings.tensor_on else settings.tensor,
    )
    served = server_settings(
        api_key, api_key_file, allow_host, allow_origin, served_name, sampling_defaults, keep_client_headers=keep_client_headers
    )
    run_shared(None if no_model else settings, sharing, ApiOptions(host, port, served, tls, tls_cert, tls_key), greet=greet)


@app.command()
def status(
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again whenever it changes, until Ctrl-C.")] = False,
) -> None:
    """Show the fleet as this machine's running node sees it."""
    from paceline.cli.status import run_status

    run_status(as_json=as_json, watch=watch)


@app.command()
def doctor(
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help="host:port of a machine to look at, beside those that are known. May be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong with this machine, or between it and others: ports, network cards, clocks, versions, kernels, room."""
    from paceline.cli.doctor import run_doctor

    run_doctor(peer or [], as_json=as_json)


@app.command()
def chat(
    question: Annotated[str | None, typer.Argument(help="Answer this once, and end. Default: a conversation.")] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", "-u", help="An endpoint. Default: one that runs on this machine; where none does, load the model."),
    ] = None,
    load: Annotated[bool, typer.Option("--load", help="Load the model here, even where an endpoint runs.")] = False,
    model: Annotated[str | None, typer.Option("--model", "-m", help=f"Default: the endpoint's first, or {DEFAULT_MODEL}.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="A system message to begin with.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, max=2.0, help="0: the likeliest tokens. Default: as the model's files say.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answers.")] = None,
    weights: Weights = None,
    device: Device = None,
    threads: Threads = None,
    context: Context = None,
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="PACELINE_API_KEY", help="The endpoint's, with --url.")] = None,
    api_key_file: ApiKeyFile = None,
    tls_ca: Annotated[Path | None, typer.Option("--tls-ca", help="Certificate (PEM) that the endpoint at --url is known by.")] = None,
) -> None:
    """Talk to a model, at an endpoint or loaded here. A question, or input from a pipe or a file, is answered once."""
    from paceline.cli.chat import run_chat
    from paceline.cli.options import read_key

    if load and url is not None:
        raise ConfigError("--load and --url contradict one another", "Give one of them.")
    settings = NodeSettings(model or DEFAULT_MODEL, weights, context=context, device=device, threads=threads, max_running=1)
    run_chat(
        settings,
        question=question,
        url=url,
        load_here=load,
        model=model,
        system=system,
        temperature=temperature,
        seed=seed,
        api_key=read_key(api_key, api_key_file),
        tls_ca=tls_ca,
    )


@app.command()
def pull(
    ref: Annotated[str, typer.Argument(help="org/name[@revision][:file] at the hub, a folder, or a GGUF file.")],
) -> None:
    """Get a model: resumes where it was cut off, and checks what it got."""
    from paceline.cli.models import run_pull

    run_pull(ref)


@app.command()
def models(
    as_json: AsJson = False,
    supported: Annotated[bool, typer.Option("--supported", help="The families of models that run, and what runs each.")] = False,
) -> None:
    """List the models on this machine."""
    from paceline.cli.models import run_models, run_supported

    (run_supported if supported else run_models)(as_json=as_json)


@app.command()
def rm(name: Annotated[str, typer.Argument(help="A pulled model's name.")]) -> None:
    """Delete a pulled model from the disk, with all that caches keep of it."""
    from paceline.cli.loaded import run_rm

    run_rm(name)


@app.command()
def ps(as_json: AsJson = False) -> None:
    """List the models that the running `paceline up` of this machine has loaded, and what they take."""
    from paceline.cli.loaded import run_ps

    run_ps(as_json=as_json)


@app.command()
def load(name: Annotated[str, typer.Argument(help="A model's name, a folder, or a GGUF file.")]) -> None:
    """Have the running `paceline up` of this machine load a model."""
    from paceline.cli.loaded import run_load

    run_load(name)


@app.command()
def unload(
    name: Annotated[str, typer.Argument(help="A loaded model's name.")],
    wait_s: Annotated[float, typer.Option("--wait-s", min=0, max=3600, help="Seconds that its answers may go on.")] = 30.0,
) -> None:
    """Free a model's memory, once its answers have ended."""
    from paceline.cli.loaded import run_unload

    run_unload(name, wait_s)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A model's name, its digest, or a file that is served.")],
    prompt_tokens: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of a typical prompt.")] = 512,
    answer_tokens: Annotated[int, typer.Option("--answer", min=1, help="Tokens of a typical answer.")] = 256,
    weights: Annotated[str, typer.Option("--weights", "-w", help="Format in memory. Default: any that is offered.")] = "",
    ways: Annotated[str, typer.Option("--ways", help="Of alone, draft, pipeline, tensor: those allowed. Default: all.")] = "",
    pin: Pins = None,
    pin_draft: PinDraft = None,
    exact: Exact = None,
    as_json: AsJson = False,
) -> None:
    """Say which machines would run a model, how fast, and why."""
    from paceline.cli.plan import fleet_view, run_plan
    from paceline.machine.config_file import read_settings
    from paceline.node.ways import parse_pin, parse_ways, plan_request
    from paceline.store.home import Home
    from paceline.ways.pipeline.order import PipelineOrder

    settings = read_settings(Home.from_environment())
    order = PipelineOrder(settings.pipeline, tuple(map(parse_pin, pin or ())), exact=settings.plan.exact if exact is None else exact)
    request = plan_request(
        *(order, model, weights),
        lengths=(prompt_tokens, answer_tokens),
        ways=parse_ways(ways),
        proposer=None if pin_draft is None else NodeId(pin_draft),
    )
    run_plan(request, fleet_view(), as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    hostfile: Annotated[Path | None, typer.Option("--hostfile", help="The ranks' hosts, in place of what the launcher says.")] = None,
) -> None:
    """Be a tensor rank that `mlx.launch` starts: rank 0 serves. All other flags are those of `paceline up`."""
    from paceline.cli.launch import run_launch

    # Parsing the flags first reports mistakes in them before this process waits for other hosts.
    run_launch(context.args, hostfile, up_params(context, context.args)["fleet_port"])


app.add_typer(benches.app)
app.add_typer(enrolment.app)
app.add_typer(share.app)
app.add_typer(hostfile.app)
app.add_typer(service.app, name="service")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")] = False,
) -> None:
    """Options of no command."""


def run() -> None:
    """Run the command asked for. Errors a person can fix are one message and exit code 2, never a traceback."""
    # Tracebacks and progress of a piped run must not wait in a buffer for a process that is killed; and a terminal that can't show
    # a character shows another.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    os.umask(os.umask(0) | 0o022)  # what is kept here can be written by its owner alone
    # gRPC's core writes on the terminal what Paceline says in its own words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except UserError as error:
        report(error)
        sys.exit(EXIT_USER)
    except PacelineError as error:
        report(error)
        sys.exit(EXIT_FAILED)
    except BrokenPipeError:
        discard(sys.stdout)
        sys.exit(EXIT_FAILED)
