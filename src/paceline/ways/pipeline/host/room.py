"""How much memory a shard takes, and how many KV blocks it gets: arithmetic on numbers."""

from __future__ import annotations

from paceline.backends.choice import part_bytes
from paceline.backends.memory import human
from paceline.backends.table import Kernels
from paceline.backends.working import working_bytes
from paceline.core.errors import BadPipelineRequest, ShardUnavailable
from paceline.core.model import ModelSpec
from paceline.core.weights import WeightSource
from paceline.fleet.plan import LEAST_ROWS
from paceline.machine.shapes import weights_bytes
from paceline.ways.pipeline.executor.sessions import StageRequest
from paceline.ways.pipeline.host.limits import SHARD_KV_SHARE


def fixed_bytes(source: WeightSource, request: StageRequest, kernels: Kernels, threads: int, streams: int) -> int:
    """Weights, and working memory for rows.

    Args:
        source: of the model.
        request: by whom it is loaded.
        kernels: that run it here.
        threads: that share a step.
        streams: that are to share it.

    Raises:
        BadPipelineRequest: the model has no such layers.
    """
    spec = source.spec
    if request.layers.stop > spec.n_layers:
        raise BadPipelineRequest(f"{request.model_id} has {spec.n_layers} layers, and up to {request.layers.stop} were asked for")
    held = weights_bytes(spec, request.weights, source.type_of, kernels)
    # `blocks_for` gives no more blocks than these.
    working = working_bytes(kernels, spec, max_rows=rows_for(request), threads=threads, n_blocks=request.n_blocks * streams)
    return part_bytes(held, request.layers, edges=False) + working


def rows_for(request: StageRequest) -> int:
    """What a shard loaded for this request takes in a batch."""
    return max(LEAST_ROWS, request.max_rows)


def block_bytes(spec: ModelSpec, request: StageRequest, block_size: int) -> int:
    return block_size * spec.kv_bytes_per_token(request.layers)


def blocks_for(request: StageRequest, streams: int, left_bytes: int, fixed: int, a_block: int, group: int) -> int:
    """The size of the pool: as many as all streams could want like this one, if there is room.

    Args:
        request: who wants it.
        streams: that are to share it.
        left_bytes: what may be taken.
        fixed: what goes to other things.
        a_block: bytes of one.
        group: blocks whose memory comes together.

    Raises:
        ShardUnavailable: not even the least would fit.
    """
    affordable = (left_bytes - fixed) // a_block // group * group
    if affordable < request.least_blocks:
        least = -(-request.least_blocks // group) * group
        raise ShardUnavailable(
            f"{len(request.layers)} layers of {request.model_id} need {human(fixed + least * a_block)}, "
            f"and {human(max(0, left_bytes))} may be taken here"
        )
    shared = int(affordable * SHARD_KV_SHARE)
    return min(request.n_blocks * streams, max(min(request.n_blocks, affordable), shared))
