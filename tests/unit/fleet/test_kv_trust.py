from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.ids import Trust
from paceline.fleet.eligibility import Use
from paceline.machine.config_file import read_settings
from paceline.store.home import Home


@pytest.mark.parametrize(
    ("table", "least"),
    [
        ("", Trust.MEMBER),
        ('min_answer_trust = "trusted"', Trust.TRUSTED),
        ('min_answer_trust = "guest"', Trust.MEMBER),
        ('min_answer_trust = "trusted"\nmin_kv_trust = "member"', Trust.MEMBER),
        ('min_kv_trust = "guest"', Trust.GUEST),
    ],
)
def test_kv_is_shared_with_machines_that_may_answer_unless_the_file_says_otherwise(tmp_path: Path, table: str, least: Trust) -> None:
    (tmp_path / "config.toml").write_text(f"[trust]\n{table}\n")
    assert read_settings(Home(tmp_path)).policy.least(Use.SHARE_KV) is least
