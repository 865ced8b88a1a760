"""What a proposer has drafted and what that took. The same counts wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.drafts import BlockProposal


@dataclass(slots=True)
class ProposerStats:
    """Sums over blocks, but for the peak."""

    blocks: int = 0
    """Asked for, empty ones included."""
    tokens: int = 0
    diffusion_steps: int = 0
    forward_passes: int = 0
    peak_activation_bytes: int = 0
    failures: int = 0
    """Blocks that were asked for and not had."""

    def count(self, block: BlockProposal) -> None:
        """A block was drafted."""
        self.blocks += 1
        self.tokens += len(block.token_ids)
        self.diffusion_steps += block.diffusion_steps
        self.forward_passes += block.forward_passes
        self.peak_activation_bytes = max(self.peak_activation_bytes, block.peak_activation_bytes)
