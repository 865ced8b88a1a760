"""What a node says of itself, on this machine, with real files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.null_backend import ByteVocabulary, NullRunner

from paceline.backends import memory
from paceline.backends.table import Kernels
from paceline.core.clock import SystemClock
from paceline.core.ids import NodeId
from paceline.core.model import BLOCK_TOKENS, LayerRange, WeightsFormat
from paceline.core.weights import EMBEDDING, HEAD, tensor_shapes
from paceline.engine.config import EngineConfig
from paceline.engine.sampling import PlainSampler
from paceline.fleet.card import EngineOffer, ModelOffer, Role, ShardState, two_digits
from paceline.machine import devices as rates
from paceline.machine.build import build_engine, introduced
from paceline.machine.capability import CapabilityReport, LocalOffers, learn_digests
from paceline.machine.devices import LocalDevice, local_devices, processor_name, usable_cores
from paceline.machine.settings import NodeSettings
from paceline.machine.sizing import model_shape
from paceline.machine.speed import Speed, SpeedCache, SpeedKey, learn_speed, measure, vocabulary_id
from paceline.store.catalog import BUNDLED, MANIFEST, locations, open_model
from paceline.store.home import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be busy where tests run."""
    monkeypatch.setattr(rates, "is_disturbed", lambda: False)
    monkeypatch.setattr("paceline.machine.speed.is_disturbed", lambda: False)


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_in_all_is_the_machine_s_or_its_container_s(tmp_path: Path) -> None:
    whole = memory.total_bytes(cgroup=tmp_path)
    assert whole > 1 << 28
    (tmp_path / "memory.current").write_text("0\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.total_bytes(cgroup=tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{1 << 28}\n")
    assert memory.total_bytes(cgroup=tmp_path) == 1 << 28


def test_the_memory_s_rate_is_measured_once_in_an_uptime(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([5e9, 7e9, 9e9])
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 5e9
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 5e9
    monkeypatch.setattr(rates.platform, "node", lambda: "another")
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 7e9
    home.memory_rate.write_text("{")
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 9e9


def test_a_rate_measured_beside_busy_programs_is_measured_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([5e9, 4e9, 7e9])
    monkeypatch.setattr(rates, "is_disturbed", lambda: True)
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 5e9
    monkeypatch.setattr(rates, "is_disturbed", lambda: False)
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 5e9
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 5e9


def test_a_rate_measured_beside_answers_is_measured_again_once_there_are_none(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "is_disturbed", lambda: False)
    measured = iter([5e9, 7e9])
    assert rates.memory_rate(home, 2, lambda _: next(measured), is_busy=True) == 5e9
    assert rates.memory_rate(home, 2, lambda _: next(measured), is_busy=True) == 5e9
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 7e9
    assert rates.memory_rate(home, 2, lambda _: next(measured)) == 7e9


def test_this_machine_s_memory_has_a_rate() -> None:
    assert 1e8 < rates.stream_rate(1) < 1e13


def test_threads_that_others_interrupt_read_as_fast_as_in_the_moment_in_which_none_was() -> None:
    """Pieces of 100 us; each thread waits for its core for 30 ms at a time, both at different times."""
    one, other = (np.cumsum([0.0, *(0.1e-3 + (30e-3 if number % 100 == late else 0.0) for number in range(500))]) for late in (20, 70))
    assert rates.best_rate([one], 1 << 18) == pytest.approx((1 << 18) / 0.1e-3)
    assert rates.best_rate([one, other], 1 << 18) == pytest.approx(2 * (1 << 18) / 0.1e-3, rel=0.01)
    apart = [one, other + one[-1]]
    assert rates.best_rate(apart, 1 << 18) == pytest.approx((1 << 18) / 0.1e-3), "never more than was read at a time"


def test_a_card_has_the_memory_s_rate_of_a_quiet_moment_once_there_was_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([0.7e9, 4.7e9])
    (own, *_) = rates.local_devices(home)
    device = replace(own, free_bytes=lambda: 1 << 30, memory_rate=lambda _: rates.memory_rate(home, 2, lambda _: next(measured)))
    report = CapabilityReport(NodeId("here"), home, [device])
    monkeypatch.setattr(rates, "is_disturbed", lambda: True)
    assert [report.look() and report.card().memory_bytes_per_s for _ in range(2)] == [700_000_000, False]
    monkeypatch.setattr(rates, "is_disturbed", lambda: False)
    assert report.look()
    assert report.card().memory_bytes_per_s == 4_700_000_000
    assert report.look() is False, "measured no more"


# --------------------------------------------------------------------------------------------------------------- speed


def test_a_speed_is_measured_once_for_its_key(home: Home) -> None:
    vocabulary = ByteVocabulary(64)
    config = EngineConfig(max_context=256, max_running=2)
    key = SpeedKey("d", "int4", 2)
    runner = NullRunner(n_blocks=64, block_size=4)
    first = learn_speed(home, key, runner, vocabulary, config, SystemClock(), PlainSampler(vocabulary.size))
    assert first.tokens_per_second > 0
    assert first.prefill_tokens_per_second > 0
    assert (first.numerics_id, first.holds_identity) == ("null", True)
    run = runner.rows_run
    assert learn_speed(home, key, runner, vocabulary, config, SystemClock(), PlainSampler(vocabulary.size)) == first
    assert runner.rows_run == run
    learn_speed(home, replace(key, threads=1), runner, vocabulary, config, SystemClock(), PlainSampler(vocabulary.size))
    assert runner.rows_run > run


def test_other_numerics_are_measured_anew_and_both_kept(home: Home) -> None:
    cache, key = SpeedCache(home), SpeedKey("d", "int4", 2)
    old, new = Speed(1.0, 2.0, "old", True, "v"), Speed(3.0, 4.0, "new", True, "v")
    cache.keep(key, old)
    assert cache.find(key) == old
    assert cache.find(key, "new") is None
    cache.keep(key, new)
    assert cache.find(key) == new
    assert cache.find(key, "old") == old


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"last": "n"}',
        '{"last": "n", "speeds": {"n": 5}}',
        '{"last": "n", "speeds": {"n": {"tokens_per_second": "fast"}}}',
        '{"last": 5, "speeds": {}}',
    ],
)
def test_a_damaged_cache_is_an_empty_one(damage: str, home: Home) -> None:
    cache, key = SpeedCache(home), SpeedKey("d", "int4", 2)
    cache.keep(key, Speed(1.0, 2.0, "n", True, "v"))
    (path,) = home.speeds.iterdir()
    whole = json.loads(path.read_text())
    path.write_text(damage)
    assert cache.find(key) is None
    whole["speeds"]["n"]["tokens_per_second"] = math.inf
    path.write_text(json.dumps(whole))
    assert cache.find(key) is None


class Ticks:
    """A clock that goes on by `step_s` each time it is read."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self._step_s = 0.0, step_s

    def monotonic(self) -> float:
        self.now_s += self._step_s
        return self.now_s

    def wall(self) -> float:
        return self.now_s


@pytest.mark.parametrize(("step_s", "most_rows"), [(1e-6, 1000), (2.0, 90)])
def test_a_slow_model_is_measured_by_a_shorter_run(step_s: float, most_rows: int) -> None:
    from paceline.engine.engine import Engine
    from paceline.engine.local import LocalExecutor

    runner, vocabulary = NullRunner(n_blocks=400, block_size=4), ByteVocabulary(64)
    clock = Ticks(step_s)
    engine = Engine(LocalExecutor(runner), vocabulary, EngineConfig(max_context=1024, prefix_cache=False), clock)
    decode, prefill = measure(engine, vocabulary, 1024, clock)
    assert decode > 0
    assert prefill > 0
    assert most_rows / 2 < runner.rows_run < most_rows


def test_a_vocabulary_s_id_is_that_of_its_tokens() -> None:
    assert vocabulary_id(ByteVocabulary(64)) == vocabulary_id(ByteVocabulary(64))
    others = [
        ByteVocabulary(65),
        ByteVocabulary(64, frozenset({1})),
        ByteVocabulary(64, spellings=(b"", b"ab")),
        ByteVocabulary(64, spellings=(b"", b"a")),
    ]
    assert len({vocabulary_id(each) for each in (ByteVocabulary(64), *others)}) == 5


# ------------------------------------------------------------------------------------------------------------ the models


def test_a_shape_adds_up_to_what_the_weights_take(home: Home) -> None:
    source = open_model(BUNDLED, home).weights
    spec, names = source.spec, tensor_shapes(source.spec)
    norms = sum(4 * prod(shape) for shape in names.values() if len(shape) == 1)
    numbers, edge = (sum(prod(names[name]) for name in some) for some in (names, names.keys() & {EMBEDDING, HEAD}))
    numbers -= norms // 4
    for weights, bits, edge_bits in ((WeightsFormat.INT4, 5, 8.5), (WeightsFormat.INT8, 8.5, 8.5), (WeightsFormat.BF16, 16, 16)):
        shape = model_shape(spec, weights, source.type_of, Kernels.AVX512_BF16)
        held = ((numbers - edge) * bits + edge * edge_bits) / 8 + norms
        assert shape.n_layers * shape.layer_bytes + shape.edge_bytes == held
        assert shape.kv_bytes_per_token_per_layer * 30 == spec.kv_bytes_per_token(spec.all_layers)


def test_a_hidden_size_that_is_padded_in_memory_has_its_own_rows_between_machines(home: Home) -> None:
    source = open_model(BUNDLED, home).weights
    odd, whole = (
        model_shape(replace(source.spec, hidden=hidden), WeightsFormat.INT8, source.type_of, Kernels.AVX512_BF16) for hidden in (100, 128)
    )
    assert (odd.hidden, odd.divided) == (100, None)
    assert (odd.layer_bytes, odd.row_bytes) == (whole.layer_bytes, whole.row_bytes)


def test_a_digest_is_empty_until_it_is_known(home: Home) -> None:
    shelf = LocalOffers(home, 2, local_devices(home))
    (before,) = shelf.offers()
    assert (before.model_id, before.weights, before.digest, before.warm) == (BUNDLED, "stored", "", False)
    assert learn_digests(shelf.unread, home, lambda: True) == ()
    assert shelf.offers()[0].digest == ""
    assert learn_digests(shelf.unread, home, lambda: False) == ()
    (after,) = shelf.offers()
    assert shelf.unread == ()
    assert len(after.digest) == 64
    assert after.files == after.digest  # of one GGUF file
    assert replace(after, digest="", files="") == before


def test_a_model_that_was_loaded_once_has_its_speed(home: Home) -> None:
    learn_digests(locations(home), home, lambda: False)
    shelf = LocalOffers(home, 2, local_devices(home))
    (offer,) = shelf.offers()
    SpeedCache(home).keep(SpeedKey(offer.digest, "stored", 2), Speed(123.4, 567.8, "n", True, "v"))
    (offer,) = shelf.offers()
    said = (offer.tokens_per_second, offer.prefill_tokens_per_second, offer.numerics_id, offer.holds_identity, offer.vocabulary)
    assert said == (123.4, 567.8, "n", True, "v")


def test_a_damaged_model_hides_no_other(home: Home, tmp_path: Path) -> None:
    folder = home.models / "org" / "broken"
    folder.mkdir(parents=True)
    (folder / "x.gguf").write_bytes(b"GGUF nothing")
    (folder / MANIFEST).write_text(json.dumps({"files": {"x.gguf": {}}}))
    shelf = LocalOffers(home, 2, local_devices(home))
    assert [offer.model_id for offer in shelf.offers()] == [BUNDLED]
    (missing,) = learn_digests(locations(home), home, lambda: False)
    assert missing.startswith("the digest of org/broken can't be computed, and without it other machines can't share the model: ")
    assert [offer.model_id for offer in shelf.offers()] == [BUNDLED]
    assert shelf.unread == ()


# ------------------------------------------------------------------------------------------------------------- the card


def test_a_card_is_measured(home: Home) -> None:
    portrait = CapabilityReport(NodeId("me"), home)
    card = portrait.card(("10.0.0.1:1",))
    assert (card.node_id, card.addresses, card.version) == ("me", ("10.0.0.1:1",), 0)
    for figure in (card.memory_total_bytes, card.memory_free_bytes, card.memory_bytes_per_s):
        assert figure == two_digits(figure) > 0
    assert card.memory_free_bytes <= card.memory_total_bytes
    assert card.backend in set(Kernels)
    assert card.device
    assert card.software
    assert [offer.role for offer in card.models] == [Role.VERIFIER]
    assert card.ring_address == ""


def test_a_rank_of_a_ring_that_is_none_is_told_why_once(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = CapabilityReport(NodeId("me"), home)
    monkeypatch.setattr("paceline.machine.devices.mlx_version", lambda: "0.30")
    monkeypatch.setenv("MLX_RANK", "1")
    for _ in range(2):
        report.look()
    assert [record.getMessage() for record in caplog.records] == [
        "this machine is in no MLX ring, though it was started as a rank of one: MLX_HOSTFILE not set: this process was not started by mlx.launch"
    ]


def test_a_look_that_sees_the_same_changes_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10_400_000_000, 10_600_000_000, 10_400_000_000, 10_700_000_000, 11_000_000_000])
    monkeypatch.setattr("paceline.machine.devices.available_bytes", lambda: next(free))
    portrait = CapabilityReport(NodeId("me"), home)
    assert [portrait.look() for _ in range(5)] == [True, False, False, False, True]
    assert portrait.card().memory_free_bytes == 11_000_000_000


def test_figures_of_engines_change_a_card_only_once_they_clearly_differ(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.machine.devices.available_bytes", lambda: 10_000_000_000)
    report = CapabilityReport(NodeId("a"), home)

    def changes(factor: float, *, loaded: bool = False) -> bool:
        engine = EngineOffer(
            "ollama", ("text",), context=4096, load_s=None if loaded else 12.0 * factor, capacity=3, first_token_s=0.4 * factor
        )
        return report.look((), (ModelOffer("m", Role.VERIFIER, "Q4_1", 20.0 * factor, 300.0 * factor, "1" * 64, warm=True, engine=engine),))

    assert changes(1.0)
    assert not any(changes(factor) for factor in (0.93, 1.07, 1.0, 0.96))
    assert changes(1.5)
    assert not changes(1.45)
    assert changes(1.5, loaded=True)
    (offer,) = [offer for offer in report.card().models if offer.engine is not None]
    assert offer.engine is not None
    assert (offer.tokens_per_second, offer.engine.first_token_s, offer.engine.load_s) == (30.0, 0.6, None)


def test_shards_come_and_go_without_a_look(home: Home) -> None:
    portrait = CapabilityReport(NodeId("me"), home)
    before = portrait.card()
    assert not before.serves_shards
    idle = ShardState(LayerRange(0, 8), max_streams=4, memory_bytes=123_456_789)
    other = replace(idle, layers=LayerRange(8, 30), queue_depth=117)
    offers = [ModelOffer("m", Role.SHARD, "int4", warm=True, shard=shard) for shard in (idle, other)]
    assert portrait.show_shards(offers, [9_876_543_210])
    card = portrait.card()
    assert (card.serves_shards, card.shard_memory_bytes) == (True, 9_800_000_000)
    assert [offer.shard for offer in card.models if offer.role is Role.SHARD] == [
        replace(idle, memory_bytes=120_000_000),
        replace(other, queue_depth=120, memory_bytes=120_000_000),
    ]
    noise = replace(offers[1], shard=replace(other, queue_depth=122, memory_bytes=124_000_000))
    assert not portrait.show_shards([offers[0], noise], [9_870_000_000])
    assert portrait.show_shards([replace(offers[0], shard=replace(idle, streams=1))], [9_870_000_000])
    assert portrait.show_shards([], None)
    assert portrait.card() == before


@pytest.mark.parametrize("gpu_bytes", [24 << 30, 100 << 20])
def test_each_device_of_a_card_has_its_own_memory_and_speed_and_what_fits_it(home: Home, gpu_bytes: int) -> None:
    """A table of devices as a machine with a GPU has it: what a card says of one is a function of what is asked of it."""
    gpu = LocalDevice(Kernels.CUDA, (WeightsFormat.BF16,), lambda: "some GPU", lambda: gpu_bytes, lambda: gpu_bytes // 2, lambda _: 9e11)
    (own,) = local_devices(home)
    processors = replace(own, weights=(WeightsFormat.STORED, WeightsFormat.INT4), free_bytes=lambda: 7 << 30, memory_rate=lambda _: 5e10)
    portrait = CapabilityReport(NodeId("me"), home, (gpu, processors))
    portrait.show_shards((), [gpu_bytes // 4, 6 << 30])
    card = portrait.card()
    for weights, device, rate, shards in (("bf16", "some GPU", 9e11, gpu_bytes // 4), ("stored", own.name(), 5e10, 6 << 30)):
        seen = card.running(weights)
        assert (seen.device, seen.memory_bytes_per_s, seen.shard_memory_bytes) == (device, rate, two_digits(shards))
    assert card.running("int4").memory_free_bytes == two_digits(7 << 30)
    offered = [offer.weights for offer in card.models if offer.role is Role.VERIFIER]
    assert offered == (["bf16", "stored"] if gpu_bytes > 1 << 30 else ["stored"])


def test_what_is_loaded_is_warm_and_measured(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_engine(NodeSettings(context=512))
    try:
        warm = introduced(built, home, SystemClock())
        portrait = CapabilityReport(NodeId("me"), home)
        portrait.look([warm])
        (offer,) = portrait.card().models
        assert offer.warm
        assert offer.digest == built.setup.digest
        assert offer.numerics_id == built.executor.numerics_id
        assert offer.holds_identity
        assert offer.tokens_per_second == two_digits(warm.speed.tokens_per_second) > 0
        assert offer.prefill_tokens_per_second == two_digits(warm.speed.prefill_tokens_per_second) > 0
        assert offer.vocabulary == vocabulary_id(built.setup.opened.tokenizer)
        assert offer.shape is not None
        assert offer.shape.max_context == 512
        assert built.engine.stats().steps == 0
        # The measuring left nothing behind: the engine answers as if it had never been.
        assert built.runner.block_size == BLOCK_TOKENS
        again = introduced(built, home, SystemClock())
        assert again == warm
        portrait.look()
        assert not portrait.card().models[0].warm
    finally:
        built.executor.close()


def test_a_processor_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Fast One\nprocessor\t: 1\nmodel name\t: Fast One\n")
    assert processor_name(tmp_path / "cpuinfo").startswith("Fast One, ")
    assert processor_name(tmp_path / "nothing").endswith(("core", "cores"))
    assert np.isfinite(usable_cores())
