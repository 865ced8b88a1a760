"""What became of a node's drafts, as `paceline status` shows it: the engine's counts beside those of who was asked."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.stats import DraftUse, EngineStats
from paceline.engine.drafts import NGRAM
from paceline.node.drafts.sources import NodeDrafts

OFF_HERE = "a machine that runs some of the layers gives other bytes for other batches, and a draft would change the answer"


def draft_use(stats: EngineStats, drafts: NodeDrafts | None) -> tuple[DraftUse, ...]:
    """By kind: those that were verified, and those that could be.

    Args:
        drafts: its sources; None: prompt lookup alone, or nothing.
    """
    sources = {} if drafts is None else drafts.sources
    names = dict.fromkeys((*stats.draft_blocks, *sources))
    if not stats.drafts_off:
        return tuple(_use(name, stats, drafts) for name in names)
    return tuple(replace(_use(name, stats, drafts), trouble=OFF_HERE) for name in names or (NGRAM,))


def _use(name: str, stats: EngineStats, drafts: NodeDrafts | None) -> DraftUse:
    counted = DraftUse(name, stats.draft_blocks.get(name, 0), stats.drafted_tokens.get(name, 0), stats.accepted_tokens.get(name, 0))
    source = None if drafts is None else drafts.sources.get(name)
    if drafts is None or source is None:
        return counted
    drafter, asked, trouble = source.drafter, drafts.meter.of(name), source.trouble
    return replace(
        counted,
        node_id="" if drafter is None else drafter.node_id,
        model_id="" if drafter is None else drafter.model_id,
        blocks=asked.blocks,
        hop_s=drafts.meter.hop.mean_s,
        failures=asked.failures,
        trouble="" if drafter is not None or trouble is None else str(trouble),
    )
