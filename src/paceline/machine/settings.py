"""What a person can set about one machine's engine, and what each setting costs; and named ways to draw, for benchmarks. Imports nothing heavy: the CLI reads
it for `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.backends.table import Kernels
from paceline.core.generation import SamplingParams
from paceline.core.ids import NodeId
from paceline.core.model import WeightsFormat

DEFAULT_MODEL = "smollm2-135m"
"""The bundled one."""


class PrefillRole(StrEnum):
    """What a node does of prompts that two could compute."""

    PREFILL = "prefill"
    """It computes them for others, and its own itself."""
    DECODE = "decode"
    """It has its own computed by others, and computes none for them."""
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """What a model may take of this machine's memory where others are loaded beside it."""

    most_bytes: int | None = None
    """In all. None: what is free."""
    promised_bytes: int = 0
    """Of what is free, what others were given and have not taken yet; below 0, what others would give back."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One model on this machine."""

    model: str = DEFAULT_MODEL
    """A bundled name, a pulled model, a folder, or a GGUF file."""
    weights: WeightsFormat | None = None
    """None: each matrix as its file has it, so that nothing is lost or inflated; bf16 on a GPU."""
    kv_tokens: int | None = None
    """Tokens of KV to hold in all. More keep longer chats and more of them in memory; each costs `kv_bytes_per_token`."""
    context: int | None = None
    """Longest prompt and answer together. None: the model's own, or as long as memory allows."""
    device: Kernels | None = None
    """None: what the table of kernels says for this machine and model."""
    threads: int | None = None
    """None: one a physical core. More than that slow each other down."""
    max_running: int = 32
    """Sequences side by side. Raising it raises the total rate and lowers each one's; the rest wait."""
    max_waiting: int = 256
    """Sequences that may wait; beyond it requests get 429. Raising it makes the last in line wait longer."""
    prefill_chunk: int = 512
    """Prompt rows in a step that no answer waits for. Raising it makes prompts faster where a machine likes many rows, and takes memory for each."""
    step_budget_ms: int = 250
    """What a step may take while an answer waits for its next token. Raising it makes prompts faster, and an answer's pauses longer."""
    tensor: tuple[float, ...] = (1.0,)
    """Speeds of the processes that share each layer, this one's first; one: it has all. Several gain where cores have memory of their own."""
    tensor_on: tuple[NodeId | None, ...] = ()
    """The nodes of the fleet that run those processes, None for this machine, which runs the first; empty: it runs all."""
    tensor_tokens: int | None = None
    """Of KV, that those nodes have room for; None: it is not known."""
    prefix_cache: bool = True
    """Off for benchmarks: it makes a repeated prompt cheaper than it is."""
    kv_disk_bytes: int = 0
    """Of this machine's disk, for KV that outlives the process, of all models together; 0: none. What was asked and answered can be read from it."""
    role: PrefillRole = PrefillRole.BOTH
    """In a fleet."""
    nixl: bool = True
    """Where it is installed: KV of nodes of this user on this host is read out of their memory."""
    kv_check_every: int = 512
    """Of KV blocks that other nodes gave, one in so many is computed again; 0: none."""
    draft: str = "auto"
    """What tokens are guessed with where a request does not say: "auto", "off", "ngram", or the id of a draft model. Changes no byte."""
    draft_on: NodeId | None = None
    """The node that drafts; None: whichever the plan finds best."""
    bound: MemoryBound = MemoryBound()


class Sampled(StrEnum):
    """How the tokens of a bench are drawn."""

    GREEDY = "greedy"
    DEFAULT = "default"
    """As the API draws what says nothing of it: at temperature 1."""
    QWEN3 = "qwen3"
    """As Qwen3's makers recommend: temperature 0.7, top-p 0.8, top-k 20."""

    @property
    def params(self) -> SamplingParams:
        match self:
            case Sampled.GREEDY:
                return SamplingParams(temperature=0.0)
            case Sampled.DEFAULT:
                return SamplingParams(seed=0)
            case Sampled.QWEN3:
                return SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=0)
