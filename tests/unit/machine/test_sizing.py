from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.cpu.shares import deal
from paceline.core.errors import ConfigError, OutOfMemory
from paceline.core.model import ModelSpec, RopeSpec
from paceline.machine.sizing import KV_SHARE, KvPlan, plan_kv, shares_bytes

SPEC = ModelSpec("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, RopeSpec(1e4), tied_head=True)
TOKEN = 2 * 2 * 3 * 64 * 30
MIB = 1 << 20


def plan(
    free: int, weights: int = 100 * MIB, context: int | None = None, kv_tokens: int | None = None, spec: ModelSpec = SPEC, group: int = 1
) -> KvPlan:
    return plan_kv(
        spec, free_bytes=free, weights_bytes=weights, max_running=32, block_size=16, group=group, context=context, kv_tokens=kv_tokens
    )


def test_with_memory_to_spare_every_running_sequence_has_everyday_room() -> None:
    assert plan(100_000 * MIB) == KvPlan(32 * 2048 // 16, 16, 8192, None, TOKEN)


def test_one_context_of_a_long_model_may_exceed_everyday_room() -> None:
    roomy = plan(100_000 * MIB, spec=replace(SPEC, max_context=131072))
    assert (roomy.context, roomy.tokens) == (131072, 131072)


def test_a_context_that_does_not_fit_is_shortened_only_if_nobody_asked_for_it() -> None:
    free = 100 * MIB + 2 * 1000 * TOKEN
    assert plan(free).context == 992
    assert plan(free).shortened_from == 8192
    with pytest.raises(OutOfMemory, match=r"8192 tokens needs 180 MiB .* --context 992 or less"):
        plan(free, context=8192)


def test_what_was_asked_is_what_is_planned() -> None:
    asked = plan(1000 * MIB, context=2048, kv_tokens=4096)
    assert (asked.context, asked.tokens, asked.shortened_from) == (2048, 4096, None)


def test_a_small_pool_shortens_the_context_that_nobody_asked_for() -> None:
    assert plan(1000 * MIB, kv_tokens=1024).context == 1024
    assert plan(1000 * MIB, kv_tokens=1024).shortened_from == 8192


def test_contradictions_are_named() -> None:
    with pytest.raises(ConfigError, match="can't hold one context"):
        plan(1000 * MIB, context=2048, kv_tokens=1024)
    with pytest.raises(ConfigError, match="8192"):
        plan(1000 * MIB, context=8193)


def test_too_little_memory_is_said_with_numbers() -> None:
    with pytest.raises(OutOfMemory, match=r"need 100 MiB, and 50 MiB"):
        plan(50 * MIB)
    with pytest.raises(OutOfMemory, match="room for"):
        plan(100 * MIB + 100 * TOKEN)
    with pytest.raises(OutOfMemory, match=r"Ask for 992 or fewer"):
        plan(100 * MIB + 1000 * TOKEN, kv_tokens=1001)


def test_memory_that_a_person_bounds_is_not_said_to_be_all_there_is() -> None:
    for free in (10 * MIB, 100 * MIB + 100 * TOKEN):
        with pytest.raises(OutOfMemory, match=r"(10|108) MiB is left of --models-memory|Only .* is left of --models-memory") as refused:
            plan_kv(
                SPEC, free_bytes=free, weights_bytes=100 * MIB, max_running=1, block_size=16, context=None, kv_tokens=None, bounded=True
            )
        assert "Raise --models-memory" in refused.value.hint
        assert "of memory is free" not in refused.value.message


@given(
    free=st.integers(0, 4000 * MIB),
    context=st.none() | st.integers(16, 8192),
    kv_tokens=st.none() | st.integers(16, 200_000),
    group=st.sampled_from([1, 16]),
)
def test_a_plan_fits_and_holds_one_context(free: int, context: int | None, kv_tokens: int | None, group: int) -> None:
    try:
        planned = plan(free, context=context, kv_tokens=kv_tokens, group=group)
    except (OutOfMemory, ConfigError):
        return  # a refusal is an answer too; the ones above check theirs
    assert planned.tokens >= planned.context
    share = KV_SHARE if kv_tokens is None else 1
    assert -(-planned.n_blocks // group) * group * 16 * TOKEN <= share * (free - 100 * MIB)
    assert context is None or planned.context == context


def test_others_that_have_room_for_less_bound_the_pool() -> None:
    kv = plan_kv(
        SPEC, free_bytes=100_000 * MIB, weights_bytes=100 * MIB, max_running=32, block_size=16, context=None, kv_tokens=None, most=5000
    )
    assert (kv.tokens, kv.context) == (4992, 4992)


def test_shares_of_ranks_take_together_what_the_model_takes() -> None:
    held = {
        "model.embed_tokens.weight": 3000 * 16,
        "model.layers.0.self_attn.q_proj.weight": 900,
        "model.layers.0.mlp.down_proj.weight": 4800,
    }
    shares = deal(SPEC, (2.0, 1.0))
    (heads, first), (other_heads, other) = (shares_bytes(SPEC, held, [share]) for share in shares)
    assert (heads, other_heads) == (2, 1)
    assert shares_bytes(SPEC, held, shares) == (3, sum(held.values()))
    assert first + other == pytest.approx(sum(held.values()) + 48000 / 3, rel=0.01)  # the first has the embedding, and so all outputs
