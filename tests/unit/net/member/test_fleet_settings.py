"""Presets by name, and what may differ from them."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.fleet import presets
from paceline.fleet.presets import DEFAULT_PRESET, PRESETS, parse_preset


def test_presets_by_name() -> None:
    assert {name: parse_preset(name) for name in PRESETS} == {
        "desk": presets.desk(),
        "lan": presets.lan(),
        "simulation": presets.simulation(),
    }
    assert DEFAULT_PRESET in PRESETS


def test_what_differs() -> None:
    preset = parse_preset("desk, ttl_s=9,exchange_s=0.5")
    assert (preset.ttl_s, preset.exchange_s, preset.fanout) == (9, 0.5, presets.desk().fanout)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no fleet preset ''"),
        ("office", "no fleet preset 'office'"),
        ("desk,nonsense=1", "no field 'nonsense'"),
        ("desk,ttl_s", "no field 'ttl_s'"),
        ("desk,ttl_s=soon", "not a number"),
        ("desk,ttl_s=9.5", "not a number"),
        ("desk,exchange_s=nan", "can't be nan"),
        ("desk,exchange_s=inf", "can't be inf"),
        ("desk,exchange_s=-1", "can't be -1"),
        ("desk,exchange_s=0", "can't work"),
        ("desk,ttl_s=5", "can't work"),
        ("desk,ttl_s=100000", "can't work"),
        ("desk,bounds=1", "no field 'bounds'"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_preset(text)
