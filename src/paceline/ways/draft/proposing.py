"""Models that this node drafts with, for others and for itself: `paceline up --propose`.

`MODEL` drafts token by token, `jacobi:MODEL` refines whole blocks. Each has a runner of its own, so that an ask never waits for an answer
that this node itself is giving.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from paceline.backends.options import LoadProgress
from paceline.core.clock import Clock
from paceline.engine.drafts import NGRAM, Proposer
from paceline.engine.local import LayerRunner
from paceline.engine.proposers.models import DraftModelProposer, JacobiProposer
from paceline.engine.proposers.ngram import NGramProposer
from paceline.engine.proposers.session import open_session
from paceline.fleet.card import ModelOffer, Role
from paceline.fleet.figures import two_digits
from paceline.machine.drive import PromptMaker
from paceline.machine.offers import warm_offer
from paceline.machine.settings import NodeSettings
from paceline.machine.setup import set_up
from paceline.machine.speed import SpeedKey, learn_speed
from paceline.store.home import Home

JACOBI = "jacobi:"
TEXTS = 4
"""Long texts whose KV is held at once. Raising it: memory, for a fleet that asks about more texts at a time."""
MAX_ROWS = 512
MEASURED_BLOCKS, MEASURED_LENGTH = 8, 7
"""Blocks that a proposer's speed is measured with: a fraction of a second, once it is loaded."""


@dataclass(frozen=True, slots=True)
class LoadedProposer:
    """A proposer ready to draft."""

    asked: str
    """As `--propose` has it."""
    model_id: str
    """As others know it."""
    proposer: Proposer
    offer: ModelOffer
    """What the card says of it."""
    runner: LayerRunner[Any] | None
    """Its own; close it once nothing is drafted any more."""


def load_proposer(name: str, threads: int | None, progress: LoadProgress | None, clock: Clock) -> LoadedProposer:
    """Load a model to draft with, and measure it.

    Args:
        name: as `--propose` has it.
        threads: None: one a physical core.
        progress: called with (bytes read, bytes to read).

    Raises:
        UserError: it can't be had.
    """
    settings = NodeSettings(name.removeprefix(JACOBI), threads=threads, max_running=TEXTS)
    setup = set_up(settings)
    opened, layers = setup.opened, setup.opened.spec.all_layers
    kv = setup.room(layers)
    runner = setup.load(layers, kv.n_blocks, MAX_ROWS, progress)
    config = replace(setup.config(kv), max_running=1, prefill_chunk=MAX_ROWS - 1)
    key = SpeedKey(setup.digest, setup.weights, setup.threads)
    with closing(setup.sampler()) as sampler:
        speed = learn_speed(Home.from_environment(), key, runner, opened.tokenizer, config, clock, sampler)
    kind = JacobiProposer if name.startswith(JACOBI) else DraftModelProposer
    proposer = kind(
        runner,
        vocabulary_size=opened.spec.vocab,
        eos_ids=opened.tokenizer.eos_ids,
        max_rows=MAX_ROWS,
        max_context=opened.spec.max_context,
    )
    model_id = (JACOBI if kind is JacobiProposer else "") + opened.name
    rate = measure(proposer, PromptMaker(opened.tokenizer, 11).make(1, 64)[0], clock)
    offer = replace(warm_offer(setup.warm(kv, speed)), role=Role.PROPOSER, model_id=model_id, tokens_per_second=rate)
    return LoadedProposer(name, model_id, proposer, offer, runner)


def lookup(clock: Clock) -> LoadedProposer:
    """Prompt lookup, measured on a text that repeats."""
    proposer = NGramProposer()
    text = [*range(200), *range(200)]
    return LoadedProposer(
        NGRAM, NGRAM, proposer, ModelOffer(NGRAM, Role.PROPOSER, "", tokens_per_second=measure(proposer, text, clock)), None
    )


def measure(proposer: Proposer, text: Sequence[int], clock: Clock) -> float:
    """Tokens a second that a proposer drafts behind a text it was told, two digits; 0 where it can't be said."""
    with closing(open_session(proposer)) as session:
        new = session.propose(0, text, MEASURED_LENGTH, 0).token_ids  # which warms up, and tells it the text
        began_s, drafted = clock.monotonic(), 0
        for _ in range(MEASURED_BLOCKS):
            new = session.propose(len(session.told), new, MEASURED_LENGTH, 0).token_ids
            drafted += len(new)
        took_s = clock.monotonic() - began_s
    return two_digits(drafted / took_s) if drafted and took_s > 0 else 0.0
