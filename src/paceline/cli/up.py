"""`paceline up`: load, serve, say where, and end quickly when told to.

Ports are taken before the model is loaded: one that another program has should not cost a load to find out, nor go to another meanwhile.
At the end the first Ctrl-C lets live answers end or move on, within a bound; the second ends them with an error, and then the process where it stands.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from paceline import __version__
from paceline.backends.memory import human
from paceline.cli import EXIT_INTERRUPTED
from paceline.cli.children import Children, engine_for
from paceline.cli.models import ensure
from paceline.cli.options import ApiOptions
from paceline.cli.progress import byte_bar, opening_bar
from paceline.cli.running import announced, running, starting
from paceline.cli.terminal import EXIT_OK, Terminal, end_now, interrupts_end_now, own_command, print_lines
from paceline.core.background import end_tasks, in_background
from paceline.core.errors import ConfigError
from paceline.core.files import nearest_folder
from paceline.core.text import shown
from paceline.fleet.presets import FleetSettings
from paceline.machine.settings import NodeSettings
from paceline.store.catalog import resolve
from paceline.store.home import Home
from paceline.ways.tensor.rank import STOP_TOLD

if TYPE_CHECKING:
    from paceline.cli.sharing_options import SharingOptions
    from paceline.core.inference import ServedModel
    from paceline.machine.build import LoadedEncoder
    from paceline.machine.engine_start import Decision
    from paceline.machine.models import Models
    from paceline.net.member.state import Claim
    from paceline.node.build import BuiltNode
    from paceline.node.planning import Constraints
    from paceline.node.serving import FleetServing
    from paceline.server.application import Application
    from paceline.server.service import ApiService
    from paceline.server.settings import TlsFiles
    from paceline.ways.draft.service import LoadedProposer
    from paceline.ways.pipeline.host.serving import Hosting


ORDERLY_S = 1.8
"""Longest an orderly stop may take once nothing is waited for; after it the process ends where it stands."""
LOOK_S = 0.05
"""Between two looks whether answers are left."""


class Ending:
    """Orderly end of one process that serves. On its event loop; takes over the signals.

    Args:
        drain_s: how long live answers may go on.
        last: called before the process ends where it stands, from any thread.
    """

    def __init__(self, console: Console, drain_s: float, last: Callable[[], None] = lambda: None) -> None:
        self.stop = asyncio.Event()
        """Set once everything is to end."""
        self._console, self._drain_s, self._last = console, drain_s, last
        self._service: ApiService | None = None
        self._models: Models[BuiltNode] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._hurried: int | None = None
        """Exit code to end with as soon as clients know, after a second signal."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal, EXIT_INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, 128 + signal.SIGTERM)
        self._rank_told = False
        """A tensor rank was told to stop before this process was, if it ever is."""
        loop.add_signal_handler(STOP_TOLD, self._on_rank_told)

    def wait_for(self, service: ApiService, models: Models[BuiltNode]) -> None:
        """Have a stop wait for what is being answered from now on."""
        self._service, self._models = service, models

    def clients_know(self) -> None:
        """End the process now if a second signal came. Called when every stream has ended."""
        if self._hurried is not None:
            self._end_now(self._hurried)
        self._service = None

    def _end_now(self, code: int) -> NoReturn:
        self._last()
        end_now(code)

    def _on_rank_told(self) -> None:
        if self._draining is None:
            self._rank_told = True
            self._begin()

    def _on_signal(self, code: int) -> None:
        if self._rank_told:  # the same stop, which reached all processes
            self._rank_told = False
        elif self._draining is not None:
            if self._service is None or self._hurried is not None:
                self._end_now(code)
            self._hurried = code
            self._draining.cancel()
            self._stop_within_bound()
        else:
            self._begin()

    def _begin(self) -> None:
        waits = "" if self._is_quiet() else f" once what is being answered has ended, in {self._drain_s:g} s at the latest"
        self._console.print(f"\nStopping{waits} (Ctrl-C again ends at once)", soft_wrap=True)
        self._draining = asyncio.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        if self._service is not None:
            self._service.is_draining = True
        if self._models is not None:
            self._models.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while not self._is_quiet():  # noqa: ASYNC110 - answers of others end in another place than those of this server
                    await asyncio.sleep(LOOK_S)
        self._stop_within_bound()

    def _stop_within_bound(self) -> None:
        self.stop.set()
        late = threading.Timer(ORDERLY_S, lambda: self._end_now(self._hurried or EXIT_OK))
        late.daemon = True
        late.start()

    def _is_quiet(self) -> bool:
        return (self._service is None or self._service.is_quiet) and (self._models is None or not self._models.live)


QUESTION = "In one sentence: why is teamwork good?"
"""One that the bundled model, which is very small, answers well."""


def run_up(
    settings: NodeSettings | None,
    api: ApiOptions,
    *,
    sharing: SharingOptions,
    greet: bool,
    fleet: FleetSettings | None = None,
    asked: Constraints | None = None,
    hosting: Hosting | None = None,
) -> NoReturn:
    """Serve until interrupted: this machine alone, or, where it is a member of a fleet, as one node of it.

    Args:
        settings: of the model; None: serve what other nodes have.
        fleet: this node's part in its fleet; None where it is in none.
        asked: what the plan for the model must keep to; None outside a fleet.
        hosting: how layers are run for others; None: they are not.

    Raises:
        UserError: an address, a model or a setting that can't be used.
    """
    api.check()
    tls = api.tls_files()
    from paceline.core.clock import SystemClock
    from paceline.machine.devices import allow_open_files
    from paceline.machine.encoders import LocalEncoders
    from paceline.machine.foreign.engines import ForeignEngines
    from paceline.machine.foreign.together import Together
    from paceline.machine.models import Models
    from paceline.node.build import build_node
    from paceline.node.engines import SharedEngines
    from paceline.node.ways import WAYS
    from paceline.server.app import create_app, service_of
    from paceline.server.serve import serve, url_of

    home, clock = Home.from_environment(), SystemClock()
    home.keep_layout(__version__)
    beside = tuple(resolve(path, home) for path in sharing.beside)
    port, notes = take_port(api, home), ExitStack()
    served = replace(api.settings, owner_key=secrets.token_urlsafe(32), ways=tuple(each.way for each in WAYS))
    certificate = None if tls is None else tls.certificate
    note = partial(announced, has_key=served.api_key is not None, certificate=certificate, owner_key=served.owner_key)
    notes.enter_context(note(url_of(api.host, port, tls), is_ready=False))
    claim = None if fleet is None else _claim(home, fleet)
    allow_open_files()
    console = Terminal()
    api.say_what_is_open(console)
    _note_small_disk(sharing.kv_disk_bytes, home.kv, console)
    # The encoder loads first: the model may take minutes, and its KV takes the memory that is left.
    encoder = None if sharing.embeddings is None else load_embeddings(sharing.embeddings, console)
    encoder_offer = None if encoder is None or fleet is None else encoder.offer(home)
    named = () if settings is None else (settings.model, *sharing.more)
    by_engine: dict[str, Decision] = {}
    for name in named:  # before the first of them takes minutes
        ensure(name, console)
        if decision := engine_for(name, sharing.engine, home, console):
            by_engine[name] = decision
    named = tuple(name for name in named if name not in by_engine)
    on_demand = fleet is None and settings is not None if sharing.on_demand is None else sharing.on_demand
    base = settings or NodeSettings()
    models = Models(build_node, base, home, clock, on_demand=on_demand, budget_bytes=sharing.memory_bytes)
    for name in named if asked is None else ():
        models.add(load(replace(base, model=name, bound=models.bound), console))
        _check_apart(encoder, models)
    proposers = [load_to_propose(name, None if settings is None else settings.threads, console) for name in sharing.propose]
    try:

        async def main() -> None:
            engines = ForeignEngines(home, clock)
            encoders = LocalEncoders(encoder, engines, encoder_offer)
            children = Children(engines, home, clock, console)
            ending = Ending(console, sharing.drain_s, children.kill)
            stop = ending.stop
            async with AsyncExitStack() as stack:
                stack.callback(encoders.close)
                stack.push_async_callback(children.stop)
                stack.push_async_callback(engines.close)
                for decision in by_engine.values():
                    if not await _unless_stopped(children.start(decision, base.context, base.threads), stop):
                        return
                shared = SharedEngines(engines, home, clock, sharing.found)
                stack.push_async_callback(end_tasks, in_background(shared.run(), "engines that are shared"))
                if fleet is None:
                    app = create_app(Together(models, engines), replace(served, mark=engines.mark), encoders, models, engines.states)
                    if proposers and models.nodes:
                        from paceline.ways.draft.service import drafting_alone

                        node = models.nodes[0]
                        drafting = drafting_alone(node.drafts, node.model.tokenizer, proposers)
                        service_of(app).metrics.add(*await stack.enter_async_context(drafting))
                else:
                    from paceline.node.pipelines import plan_loads
                    from paceline.node.serving import serving

                    member = serving(models, fleet, home, clock, stop, hosting, proposers, beside, claim, engines, encoders)
                    whole = await stack.enter_async_context(member)
                    print_lines(console, f"Node {whole.fleet.node_id} at {', '.join(whole.fleet.addresses)}")
                    if asked is not None:
                        plan_loads(whole, asked, named, clock)
                    for name in named:
                        if asked is not None and not await _plan_and_load(whole, replace(base, model=name), asked, stop, console):
                            return
                        _check_apart(encoder, models)
                    app = create_app(whole.inference, replace(served, mark=engines.mark), whole.encoders, models, engines.states)
                    service_of(app).metrics.add(*whole.collectors)
                    await whole.settle(stop)
                await shared.settle()
                ending.wait_for(service_of(app), models)
                await answer(app, engines, stop)
                ending.clients_know()

        async def answer(app: Application, engines: ForeignEngines, stop: asyncio.Event) -> None:

            def ready(url: str) -> None:
                reach = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
                notes.enter_context(note(reach))
                others = "" if reach == url else ", and at this machine's other addresses"
                console.print(f"\n[bold green]Ready[/] at [bold]{reach}/v1[/]{others} (Ctrl-C stops)", soft_wrap=True)
                if served := [*models.models()[:1], *engines.models()[:1]]:
                    # In a thread: what is asked first is asked through the endpoint, on the loop that calls this.
                    told = (console, served[0], reach, api.settings.api_key, tls, greet)
                    threading.Thread(target=_welcome, args=told, daemon=True).start()

            with notes:
                await serve(app, api.host, port, stop=stop, on_ready=ready, tls=tls)

        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(main())
    finally:
        models.close()
    # Everything is closed and nothing is left to write; the interpreter's own end would free a model object by object.
    end_now(EXIT_OK)


def _claim(home: Home, fleet: FleetSettings) -> Claim:
    from paceline.net.member.state import Claim
    from paceline.net.trust.folder import FleetFolder

    return Claim(FleetFolder(home.fleet), fleet)


def take_port(api: ApiOptions, home: Home) -> socket.socket:
    """Bind the API's port and hold it.

    Raises:
        ConfigError: the port can't be bound. If an endpoint of this user has it, the message names that endpoint.
    """
    from paceline.server.serve import bind

    try:
        return bind(api.host, api.port)
    except ConfigError as error:
        ours = next((one for one in (*running(home), *starting(home)) if one.url.endswith(f":{api.port}")), None)
        if ours is None:
            raise
        hint = "Ask that one: `paceline status` shows it, `paceline load` has it load another model. Or choose another --port."
        raise ConfigError(f"A paceline up (process {ours.process}) serves at {ours.url} already", hint) from error


def _check_apart(encoder: LoadedEncoder | None, models: Models[BuiltNode]) -> None:
    if encoder is not None and any(encoder.name.lower() == each.model.name.lower() for each in models.nodes):
        raise ConfigError(f"--embeddings and --model are both called {encoder.name}", "Clients could not tell them apart: rename a folder.")


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Wait for some work. Return False, and cancel it, if the process must stop before that."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await end_tasks(stopping)
    if working.done():
        working.result()
        return True
    await end_tasks(working)
    return False


async def _plan_and_load(
    whole: FleetServing, settings: NodeSettings, asked: Constraints, stop: asyncio.Event, console: Console
) -> BuiltNode | None:
    """Serve the model as this node's plan says. None where it was interrupted meanwhile."""
    from paceline.core.clock import SystemClock
    from paceline.node.pipelines import LoadTold, serve_planned

    began_s = time.perf_counter()
    await whole.settle(stop)
    with opening_bar(console, settings.model) as (reading, own, others):
        told = LoadTold(reading, own, others, partial(print_lines, console))
        opening = asyncio.create_task(serve_planned(whole, settings, asked, SystemClock(), told))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        opening.cancel()
        return None
    stopping.cancel()
    return _told_loaded(opening.result(), began_s, console)


def _note_small_disk(kv_disk_bytes: int, folder: Path, console: Console) -> None:
    """Print a note if the free space, with the KV already in `folder`, is less than KV may take. Files are counted only if little is free."""
    from paceline.store.partial import allocated_bytes

    free = shutil.disk_usage(nearest_folder(folder)).free
    if free < kv_disk_bytes and (room := free + allocated_bytes(folder)) < kv_disk_bytes:
        console.print(f"[yellow]note:[/] --kv-disk may take {human(kv_disk_bytes)}, and {folder} has room for {human(room)}: less is kept")


def load(settings: NodeSettings, console: Console) -> BuiltNode:
    """Build a node with a progress bar. Ctrl-C meanwhile ends the process at once. A model that only the fleet has is fetched first."""
    ensure(settings.model, console)
    resolve(settings.model, Home.from_environment())  # what is not there is not said to load
    began_s = time.perf_counter()
    gc.freeze()  # what was imported stays: a load collects garbage twice, and need not look there
    with interrupts_end_now(EXIT_INTERRUPTED), _loading(settings.model, console) as progress:
        from paceline.node.build import build_node

        node = build_node(settings, progress)
    return _told_loaded(node, began_s, console)


def _told_loaded(node: BuiltNode, began_s: float, console: Console) -> BuiltNode:
    for note in node.notes:
        console.print(f"[yellow]note:[/] {note}")
    # Nothing that was loaded dies before the process does: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    print_lines(console, f"Loaded in {time.perf_counter() - began_s:.1f} s: {node.summary}")
    return node


@contextmanager
def _loading(what: str, console: Console) -> Generator[Callable[[int, int], None]]:
    """Show a bar while the block loads something, or one line if output is not a terminal."""
    label = f"Loading {what}"
    if not console.is_terminal:
        print_lines(console, label)
    with byte_bar(console, label, "Preparing kernels") as progress:
        yield progress


def load_embeddings(ref: str, console: Console) -> LoadedEncoder:
    """Load an encoder. A model of that name that only the fleet has does not count."""
    from paceline.core.clock import SystemClock
    from paceline.machine.build import load_encoder

    began_s = time.perf_counter()
    with interrupts_end_now(EXIT_INTERRUPTED):
        encoder = load_encoder(ref, SystemClock())
    print_lines(console, f"Loaded in {time.perf_counter() - began_s:.1f} s: {encoder.summary}")
    return encoder


def load_to_propose(name: str, threads: int | None, console: Console) -> LoadedProposer:
    """`load`, of a model to draft with."""
    from paceline.core.clock import SystemClock
    from paceline.ways.draft.names import JACOBI
    from paceline.ways.draft.service import load_proposer

    ensure(name.removeprefix(JACOBI), console)
    began_s = time.perf_counter()
    with interrupts_end_now(EXIT_INTERRUPTED), _loading(f"{name} to draft with", console) as progress:
        proposer = load_proposer(name, threads, progress, SystemClock())
    rate = proposer.offer.tokens_per_second
    print_lines(console, f"Loaded in {time.perf_counter() - began_s:.1f} s: {proposer.model_id} drafts {rate:g} tokens/s")
    return proposer


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every system
        return None
    return uvloop.new_event_loop


def _welcome(console: Console, model: ServedModel, url: str, api_key: str | None, tls: TlsFiles | None, greet: bool) -> None:
    """Say what to try, last of all."""
    chats = model.tokenizer.chat_template is not None or model.chats is not None
    ca = tls.certificate if tls is not None and tls.own else None
    if ca is not None:
        print_lines(console, f"Clients trust this machine by the file {ca}")
    if greet and chats:
        _greet(console, url, model.name, api_key, ca)
    asked = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]} if chats else {"prompt": "The sky is blue because"}
    body = {"model": model.name, **asked, "max_tokens": 100, "temperature": 0}
    curl = f"curl {url}/v1/{'chat/' * chats}completions -H 'Content-Type: application/json'"
    key = ' -H "Authorization: Bearer $PACELINE_API_KEY"' if api_key else ""
    key += "" if ca is None else f" --cacert {shlex.quote(str(ca))}"
    trusting = "" if ca is None else f" --tls-ca {shlex.quote(str(ca))}"
    print_lines(
        console,
        "Try:" if not api_key or api_key == os.environ.get("PACELINE_API_KEY") else "Try, with the key in PACELINE_API_KEY:",
        f"  {curl}{key} -d {shlex.quote(json.dumps(body))}",
        f"  {own_command()} chat --url {url}{trusting}"
        if chats
        else f"{model.name} has no chat template: it continues texts, and answers no chats",
        end="\n\n",
    )


def _greet(console: Console, url: str, model: str, api_key: str | None, ca: Path | None) -> None:
    from paceline.cli.endpoint import EndpointClient, EndpointError

    print_lines(console, f"> {QUESTION}", style="dim")
    try:
        with EndpointClient(url, api_key, ca) as endpoint:
            for text in endpoint.say(model, [{"role": "user", "content": QUESTION}], temperature=0.0, seed=None, max_tokens=80):
                print_lines(console, shown(text), end="")
        console.print("\n")
    except EndpointError as error:
        print_lines(console, f"\nThe answer broke off: {error}")
