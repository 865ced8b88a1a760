"""Conversations over three machines that are struck: no byte is wrong, and no lease, block or file is left.

`make soak` has 500 of them; `make test-all` 12.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from tests.fleet.machines import until, until_nothing
from tests.fleet.test_forwarding import metric
from tests.soak.conversations import left_of, wandering

CONVERSATIONS = int(os.environ.get("PACELINE_SOAK_CONVERSATIONS", "12"))
SEED = int(os.environ.get("PACELINE_SOAK_SEED", "4"))
CLIENTS = 3
ENOUGH_TO_SEE = 50
"""Conversations of which some are fetched, and some pushed, whatever is drawn."""

pytestmark = [pytest.mark.whole("machines are struck for minutes"), pytest.mark.timeout(600 + 60 * CONVERSATIONS)]


def test_conversations_go_on_whatever_machines_suffer_and_nothing_is_left(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with wandering(tmp_path, SEED, CONVERSATIONS) as (whole, conversations):
        whole.run(conversations, CLIENTS)
        faults = ", ".join(f"{count} x {fault}" for fault, count in sorted(whole.faults.items()))
        counts = "\n".join(f"  {name} {count}" for name, count in sorted(whole.seen.items()) if count)
        sys.stdout.write(  # seen with -s
            f"\n{len(conversations)} conversations, {whole.turns} turns in {time.monotonic() - began_s:.0f} s; {faults}; "
            f"{whole.moved} turns moved on; {len(whole.wrong)} wrong\n{counts}\n"
        )
        assert not whole.wrong, "\n".join(whole.wrong)
        for machine in whole.machines:
            for what in ("paceline_requests_running", "paceline_kv_blocks_used", "paceline_kv_leases"):
                until(lambda machine=machine, what=what: metric(machine, what) == 0)
            until_nothing(lambda machine=machine: left_of(machine))
            assert not machine.violations
        if CONVERSATIONS >= ENOUGH_TO_SEE:
            for kind in ('peer_blocks_total{what="fetched"}', 'pushes_total{outcome="whole"}'):
                assert whole.seen[f"paceline_kv_{kind}"], kind
