"""Simulated nodes: rounds until every node knows every other, bytes a node sends and receives in a round afterwards, and how long views show a dead node.

    python bench/gossip.py                                   # a thousand nodes
    python bench/gossip.py --nodes 50 --preset lan --churn 1

Nodes start together on a random graph in which each is given `--degree` addresses. They run the real `Gossip`, on a network with loss. When
the fleet has converged it is measured at rest for some rounds, then with churn (nodes killed, others started). At last one node is killed, and the
time is measured until no view shows it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fakes.gossip_network import SimulatedNetwork, SimulatedNode

from gossip_wire import size
from paceline.fleet.presets import Preset, lan, simulation

CARD_BYTES = 760
"""A signed card: two models, four links, two addresses."""
CERTIFICATE_BYTES = 480


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run showed."""

    nodes: int
    degree: int
    loss: float
    exchange_s: float
    ttl_s: int
    fanout: int
    rounds_to_converge: int
    bytes_to_converge_per_node: int
    steady_bytes_per_node_round: int
    steady_bytes_most_loaded: int
    steady_missing: int
    churn_per_round: int
    churn_bytes_per_node_round: int
    churn_missing: int
    churn_dead_shown: int
    dead_shown_s: float
    """Seconds from a node's death until no view shows it."""
    dead_shown_ttls: float
    """The same in TTLs."""
    oldest_card_s: float
    wall_s: float


def random_graph(network: SimulatedNetwork, count: int, degree: int, rng: random.Random) -> None:
    """Start nodes, each with the addresses of `degree` others."""
    labels = [f"node-{number:04}" for number in range(count)]
    for label in labels:
        network.start(label, seeds=rng.sample([other for other in labels if other != label], min(degree, count - 1)))


def missing(grown_up: list[SimulatedNode]) -> int:
    """How many pairs (a, b) there are where a does not show b, though both were there long enough."""
    ids = {node.node_id for node in grown_up}
    return sum(len(ids - node.gossip.members.keys()) - 1 for node in grown_up)


def converged(network: SimulatedNetwork) -> bool:
    """Whether every node shows every other."""
    ids = {node.node_id for node in network.nodes.values()}
    return all(len(ids - node.gossip.members.keys()) == 1 for node in network.nodes.values())


def counted(network: SimulatedNetwork, rounds: int, step: float) -> tuple[float, int]:
    """Let rounds pass; bytes a node and round, on average and of the most loaded node."""
    before = {node.label: node.bytes_sent + node.bytes_received for node in network.nodes.values()}
    network.run(rounds * step)
    spent = [node.bytes_sent + node.bytes_received - before.get(node.label, 0) for node in network.nodes.values()]
    return sum(spent) / len(spent) / rounds, max(spent) // rounds


def shown_after_death(network: SimulatedNetwork, rng: random.Random) -> float:
    """Kill a node; return the seconds until no view shows it, to a hundredth of the TTL."""
    dead, died = network.kill(rng.choice(sorted(network.nodes))), network.now
    while any(dead.node_id in node.gossip.members for node in network.nodes.values()) and network.now - died < 3 * network.preset.ttl_s:
        network.run(network.preset.ttl_s / 100)
    return network.now - died


def simulate(
    preset: Preset, count: int, *, degree: int, loss: float, seed: int, steady_rounds: int, churn: int, churn_rounds: int, dead: bool = True
) -> Outcome:
    """Run the whole story once; without `dead` nothing is measured of a node that dies."""
    began = time.perf_counter()
    rng = random.Random(seed)
    network = SimulatedNetwork(preset, seed=seed, loss=loss, size=size, sealed_bytes=CARD_BYTES, certificate_bytes=CERTIFICATE_BYTES)
    random_graph(network, count, degree, rng)
    step = preset.exchange_s
    rounds = 0
    while not converged(network) and rounds < 40:
        network.run(step)
        rounds += 1
    to_converge = sum(node.bytes_sent + node.bytes_received for node in network.nodes.values()) // count
    network.run(2 * step)
    steady, most = counted(network, steady_rounds, step)
    steady_missing = missing(list(network.nodes.values()))
    some = list(network.nodes.values())[:50]
    oldest = max(live.age_s for node in some for live in node.gossip.view(network.clock(node)).nodes)

    killed: dict[str, float] = {}
    old_hands = list(network.nodes.values())
    spent, born = 0.0, 0
    for _ in range(churn_rounds if churn else 0):
        for _ in range(churn):
            label = rng.choice(sorted(network.nodes))
            killed[network.kill(label).node_id] = network.now
            born += 1
            network.start(f"late-{born:04}", seeds=rng.sample(sorted(network.nodes), degree))
        spent += counted(network, 1, step)[0]
    late = {id_ for id_, died in killed.items() if network.now - died > preset.ttl_s}
    shown = sum(len(late.intersection(node.gossip.view(network.clock(node)).ids)) for node in network.nodes.values()) if late else 0
    churn_missing = missing([node for node in old_hands if node.alive])
    dead_shown_s = shown_after_death(network, rng) if dead else 0.0
    return Outcome(
        nodes=count,
        degree=degree,
        loss=loss,
        exchange_s=step,
        ttl_s=preset.ttl_s,
        fanout=preset.fanout,
        rounds_to_converge=rounds,
        bytes_to_converge_per_node=to_converge,
        steady_bytes_per_node_round=round(steady),
        steady_bytes_most_loaded=most,
        steady_missing=steady_missing,
        churn_per_round=churn,
        churn_bytes_per_node_round=round(spent / churn_rounds) if churn else 0,
        churn_missing=churn_missing,
        churn_dead_shown=shown,
        dead_shown_s=round(dead_shown_s, 1),
        dead_shown_ttls=round(dead_shown_s / preset.ttl_s, 2),
        oldest_card_s=round(oldest, 1),
        wall_s=round(time.perf_counter() - began, 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--degree", type=int, default=3, help="addresses each node is given")
    parser.add_argument("--loss", type=float, default=0.05, help="share of messages that never arrive")
    parser.add_argument("--churn", type=int, default=5, help="nodes killed, and as many started, a round")
    parser.add_argument("--churn-rounds", type=int, default=4)
    parser.add_argument("--steady-rounds", type=int, default=4, help="a multiple of the rounds in which a card is signed again once")
    parser.add_argument("--no-dead", action="store_true", help="do not wait until a node that was killed has left every view: one TTL less")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--preset", choices=["lan", "simulation"], default="simulation")
    given = parser.parse_args()
    gc.disable()  # a million live objects, and no cycles among those that die
    outcome = simulate(
        {"lan": lan, "simulation": simulation}[given.preset](),
        given.nodes,
        degree=given.degree,
        loss=given.loss,
        seed=given.seed,
        steady_rounds=given.steady_rounds,
        churn=given.churn,
        churn_rounds=given.churn_rounds,
        dead=not given.no_dead,
    )
    for name, value in asdict(outcome).items():
        print(f"{name.replace('_', ' '):32} {value:>14,}", file=sys.stderr)
    print(json.dumps(asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
