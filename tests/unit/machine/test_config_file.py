"""config.toml is read as it is written, or refused with the key's name; the documentation says the same as the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from tests.sampling import examples

from paceline.core.errors import ConfigError
from paceline.core.ids import Trust
from paceline.machine.config_file import CONFIG_FILE, TABLES, HostSettings, PipelineSettings, allowed, read_pipeline_settings
from paceline.store.home import Home

DOCS = Path(__file__).parents[3] / "docs/reference/configuration.md"


def read(folder: Path, text: str | bytes) -> PipelineSettings:
    (folder / CONFIG_FILE).write_bytes(text.encode() if isinstance(text, str) else text)
    return read_pipeline_settings(Home(folder))


def test_no_file_means_the_defaults(tmp_path: Path) -> None:
    found = read_pipeline_settings(Home(tmp_path))
    assert found == PipelineSettings() == read(tmp_path, "")
    assert found.model_dump() == {
        "enabled": True,
        "tensor_port": 0,
        "max_shards_per_request": 16,
        "shard_health_timeout_seconds": 30,
        "stall_seconds": 2.0,
        "fallback_to_local": None,
        "fallback_to_local_after_failures": None,
        "activation_dtype": "bf16",
        "allow_self_as_shard": True,
        "max_concurrent_pipelines": 4,
        "min_host_trust": "member",
        "spot_check_every": 0,
        "search_seconds": 30,
        "keep_spares": True,
        "report_ms": 100,
        "host": {
            "serve_shards": False,
            "shard_eviction_idle_seconds": 600,
            "shard_max_memory_mb": None,
            "max_concurrent_streams": 4,
            "min_caller_trust": "member",
        },
    }


def test_what_is_written_counts_and_the_command_line_more(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        [pipeline]
        enabled = true
        stall_seconds = 5            # a whole number is a number
        activation_dtype = "fp32"
        min_host_trust = "trusted"
        fallback_to_local_after_failures = 2
        [pipeline.host]
        serve_shards = true
        shard_max_memory_mb = 20000
        """,
    )
    assert (found.enabled, found.stall_seconds, found.activation_dtype, found.min_host_trust) == (True, 5, "fp32", Trust.TRUSTED)
    assert found.fallback_to_local_after_failures == 2
    assert found.host == HostSettings(serve_shards=True, shard_max_memory_mb=20000)
    assert found.overridden() == found
    other = found.overridden(enabled=False, serve_shards=False)
    assert (other.enabled, other.host.serve_shards, other.host.shard_max_memory_mb) == (False, False, 20000)
    with pytest.raises(ValidationError):
        found.enabled = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[pipeline]\nenabeld = true", "[pipeline] enabeld does not exist", "There are: enabled, max_shards_per_request"),
        ("[pipeline.host]\nenabled = true", "[pipeline.host] enabled does not exist", "There are: serve_shards"),
        ("[pipelines]", "has a table or key 'pipelines', which does not exist", "There are: [trust], [kv], [plan], [pipeline]."),
        ("pipeline = 3", "pipeline is no table", "Write it as [pipeline]."),
        ("[pipeline]\nhost = true", "pipeline.host is no table", "Write it as [pipeline.host]."),
        ("[pipeline]\nenabled = 1", "[pipeline] enabled can't be 1", "It is true or false."),
        ('[pipeline]\nenabled = "yes"', "[pipeline] enabled can't be 'yes'", "It is true or false."),
        ("[pipeline]\nmax_shards_per_request = 0", "max_shards_per_request can't be 0", "It is a whole number from 1 to 256."),
        ("[pipeline]\nmax_shards_per_request = true", "can't be True", "It is a whole number from 1 to 256."),
        ("[pipeline]\nmax_shards_per_request = 2.5", "can't be 2.5", "It is a whole number from 1 to 256."),
        ("[pipeline]\nstall_seconds = nan", "stall_seconds can't be nan", "It is a number from 0.05 to 300."),
        ("[pipeline]\nsearch_seconds = inf", "search_seconds can't be inf", "It is a number from 0 to 86400."),
        ("[pipeline]\nstall_seconds = true", "stall_seconds can't be True", "It is a number from 0.05 to 300."),
        ('[pipeline]\nactivation_dtype = "int8"', "activation_dtype can't be 'int8'", 'It is "bf16", "fp16" or "fp32".'),
        ('[pipeline]\nmin_host_trust = "admiral"', "can't be 'admiral'", 'It is "guest", "member" or "trusted".'),
        ("[pipeline]\nfallback_to_local_after_failures = 0", "after_failures can't be 0", "It is a whole number from 1 to 1000."),
        ("[pipeline.host]\nmax_concurrent_streams = -1", "[pipeline.host] max_concurrent_streams can't be -1", "from 1 to 256"),
        ("[pipeline.host]\nmin_caller_trust = 3", "[pipeline.host] min_caller_trust can't be 3", '"guest", "member" or "trusted"'),
        ("[pipeline", "is no TOML", "docs/reference/configuration.md"),
        ("a = " + "[" * 5000, "is no TOML", "docs/reference/configuration.md"),
        (b"\xff", "can't be read: it is not UTF-8", "remove it"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(tmp_path: Path, text: str | bytes, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / CONFIG_FILE) in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_file_that_cant_be_read_is_no_default(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).mkdir()
    with pytest.raises(ConfigError, match="can't be read"):
        read_pipeline_settings(Home(tmp_path))


@settings(max_examples=examples(60), deadline=None)
@given(
    key=st.sampled_from([*PipelineSettings.model_fields, "nothing"]),
    value=st.sampled_from(
        ["1", "-1", "1.5", "true", '""', '"bf16"', "[]", "{}", "{a = 1}", "1979-05-27", "99999999999999999999", "[[1]]", "'''\n'''"]
    ),
)
def test_any_value_is_a_setting_or_refused(tmp_path_factory: pytest.TempPathFactory, key: str, value: str) -> None:
    said = ""
    try:
        read(tmp_path_factory.getbasetemp(), f"[pipeline]\n{key} = {value}")
    except ConfigError as error:
        said = error.message
    assert "\n" not in said
    assert not said or key in said
    assert said or key != "nothing"


@pytest.mark.parametrize(("heading", "table"), TABLES.items())
def test_the_documentation_has_every_key_and_its_default(heading: str, table: type[BaseModel]) -> None:
    section = DOCS.read_text().split(f"\n## `[{heading}]`\n")[1].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", section, re.MULTILINE))
    fields = {key: field for key, field in table.model_fields.items() if key != "host"}
    assert list(rows) == list(fields)
    for key, field in fields.items():
        written = {True: "true", False: "false"}.get(field.default) if isinstance(field.default, bool) else field.default
        written = f'"{written}"' if isinstance(field.default, str) else "not set" if written is None else str(written)
        assert rows[key] == written, key
        assert f"| `{key}` |" in section
        assert allowed(table, key).replace('"', "") in section.split(f"| `{key}` |")[1].partition("\n")[0].replace("`", "").replace(
            '"', ""
        ), key
