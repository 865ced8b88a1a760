"""Scenario files of gossip: commands, `----`, and what happened. `python tests/scenarios/rewrite.py` writes what happens now.

start LABEL [id=ID] [seeds=A,B] [skew=SECONDS]      a process of node ID (LABEL where none is given)
restart LABEL [seeds=A,B] [skew=SECONDS] [forgetful]  the same machine, a new process; forgetful: its disk lost the last version
kill LABEL / leave LABEL                            without, with a goodbye
say LABEL                                           the node has something new in its card
partition A B | C D / heal
run SECONDS / rounds N                              events are printed as they happen
keep NAME ID LABEL / replay NAME LABEL              the card LABEL holds of ID; hand it to LABEL, later
revoke ID LABEL                                     the CA on LABEL
view / ages / clashes                               what each node sees
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.fakes.gossip_network import SimulatedNetwork, SimulatedNode

from paceline.core.ids import NodeId
from paceline.fleet.messages import (
    Appeared,
    Changed,
    Clashed,
    Effect,
    ExchangeRequest,
    Expired,
    GossipCall,
    Ignored,
    Left,
    PassedCard,
    Renew,
    Reseal,
    Restarted,
    Revoked,
)
from paceline.fleet.presets import lan


def told(effect: Effect) -> str:
    match effect:
        case Appeared(card):
            return f"{card.node_id} appeared"
        case Changed(card):
            return f"{card.node_id} has a new card"
        case Restarted(card):
            return f"{card.node_id} restarted"
        case Left(node_id):
            return f"{node_id} left"
        case Expired(node_id):
            return f"{node_id} expired"
        case Revoked(node_id):
            return f"{node_id} is revoked"
        case Clashed(node_id, addresses, other_addresses):
            return f"CLASH: {node_id} runs here, at {' '.join(addresses)}, and elsewhere, at {' '.join(other_addresses)}"
        case Ignored(peer, node_id, reason):
            return f"ignored{f' of {node_id}' if node_id else ''}, from {peer}: {reason}"
        case Reseal(_, reason):
            return f"signs a new card: {reason}"
        case GossipCall() | Renew():
            raise AssertionError("what each round does is not told")


class Script:
    """Runs the commands of one file."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.kept: dict[str, PassedCard] = {}
        self.network = SimulatedNetwork(lan(), seed=1, on_effect=self._happened)

    def _happened(self, now: float, node: SimulatedNode, effect: Effect) -> None:
        if not isinstance(effect, GossipCall | Renew):
            self.out.append(f"{now:7.1f} {node.label}: {told(effect)}")

    def run(self, line: str) -> None:
        name, *words = line.split()
        plain = [word for word in words if "=" not in word]
        named = dict(word.split("=") for word in words if "=" in word)
        command: Callable[[list[str], dict[str, str]], None] = getattr(self, f"do_{name}")
        command(plain, named)

    def do_start(self, words: list[str], named: dict[str, str]) -> None:
        seeds = named.get("seeds", "")
        self.network.start(
            words[0], node_id=named.get("id", ""), seeds=seeds.split(",") if seeds else (), skew_s=float(named.get("skew", "0"))
        )

    def do_restart(self, words: list[str], named: dict[str, str]) -> None:
        old = self.network.kill(words[0])
        seeds = named.get("seeds", "")
        self.network.start(
            old.label,
            node_id=old.node_id,
            seeds=seeds.split(",") if seeds else (),
            skew_s=float(named.get("skew", old.skew_s)),
            persisted=0 if "forgetful" in words else old.persisted,
        )

    def do_kill(self, words: list[str], named: dict[str, str]) -> None:
        self.network.kill(words[0])

    def do_leave(self, words: list[str], named: dict[str, str]) -> None:
        self.network.leave(words[0])

    def do_say(self, words: list[str], named: dict[str, str]) -> None:
        self.network.announce(self.network.nodes[words[0]])

    def do_partition(self, words: list[str], named: dict[str, str]) -> None:
        self.network.partition(*(part.split() for part in " ".join(words).split("|")))

    def do_heal(self, words: list[str], named: dict[str, str]) -> None:
        self.network.heal()

    def do_run(self, words: list[str], named: dict[str, str]) -> None:
        self.network.run(float(words[0]))

    def do_rounds(self, words: list[str], named: dict[str, str]) -> None:
        # A jittered round is a tenth longer at most.
        self.network.run(int(words[0]) * self.network.preset.exchange_s * (1 + self.network.preset.jitter))

    def do_keep(self, words: list[str], named: dict[str, str]) -> None:
        name, node_id, label = words
        holder = self.network.nodes[label]
        if node_id == holder.node_id:
            passed = holder.gossip.own_passed(self.network.clock(holder))
            assert passed is not None
            self.kept[name] = passed
        else:
            reply = holder.gossip.on_request(ExchangeRequest(digests=frozenset()), NodeId("keeper"), self.network.clock(holder)).reply
            self.kept[name] = next(passed for passed in reply.cards if passed.sealed.card.node_id == node_id)

    def do_replay(self, words: list[str], named: dict[str, str]) -> None:
        # Whoever replays a card lies about its age.
        node = self.network.nodes[words[1]]
        card = replace(self.kept[words[0]], age_s=0.0)
        effects = node.gossip.on_request(ExchangeRequest(cards=(card,)), NodeId("mallory"), self.network.clock(node)).effects
        for effect in effects:
            self._happened(self.network.now, node, effect)

    def do_revoke(self, words: list[str], named: dict[str, str]) -> None:
        self.network.revoke(words[0], words[1])

    def do_view(self, words: list[str], named: dict[str, str]) -> None:
        views: dict[str, list[str]] = {}
        for node in self.network.nodes.values():
            ids = " ".join(node.gossip.view(self.network.clock(node)).ids)
            views.setdefault(ids, []).append(node.label)
        self.out += [f"{' '.join(labels)} {'see' if len(labels) > 1 else 'sees'}: {ids}" for ids, labels in views.items()]

    def do_ages(self, words: list[str], named: dict[str, str]) -> None:
        for node in self.network.nodes.values():
            live = node.gossip.view(self.network.clock(node)).nodes
            self.out.append(f"{node.label}: " + ", ".join(f"{one.card.node_id} {one.age_s:.1f} s, beat {one.beat}" for one in live))

    def do_clashes(self, words: list[str], named: dict[str, str]) -> None:
        for node in self.network.nodes.values():
            clashes = node.gossip.view(self.network.clock(node)).clashes
            self.out.append(f"{node.label}: " + (", ".join(clash.node_id for clash in clashes) or "none"))


def blocks(text: str) -> Iterator[list[str]]:
    """The lines of each block: a block ends at an empty line."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def rewritten(path: Path) -> str:
    """The file as it should be: its commands with what they do now."""
    script = Script()
    written: list[str] = []
    for block in blocks(path.read_text()):
        commands = block[: block.index("----")] if "----" in block else block
        written += commands
        script.out.clear()
        for line in commands:
            if not line.startswith("#"):
                script.run(line)
        if any(not line.startswith("#") for line in commands):
            written += ["----", *script.out]
        written.append("")
    return "\n".join(written).rstrip("\n") + "\n"
