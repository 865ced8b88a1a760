"""`paceline` on a machine that measures itself twice a second; as `wrong`, what its model drafts is never what follows, and it says that it is quick.

Put before a command: `wrong_drafter.py right|wrong PYTHON -m paceline up`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.cli import main
from paceline.engine.drafts import BlockProposal
from paceline.net.member import upkeep
from paceline.ways.draft import service

RARE = 48_123
"""A token that the bundled model does not write."""


class Wrong:
    def propose_block(self, committed: Sequence[int], block_size: int, num_steps: int) -> BlockProposal:
        del committed, num_steps
        return BlockProposal((RARE,) * block_size)


def load_wrong(*arguments: Any) -> service.LoadedProposer:
    made = load(*arguments)
    return replace(made, proposer=Wrong(), offer=replace(made.offer, tokens_per_second=1e5))


load = service.load_proposer
if __name__ == "__main__":
    upkeep.PORTRAIT_S = 0.5
    if sys.argv[1] == "wrong":
        service.load_proposer = load_wrong
    sys.argv[1:] = sys.argv[5:]
    main()
