from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.scripted_inference import ScriptedInference

from paceline.core.errors import ConfigError
from paceline.core.stats import Histogram, Metrics
from paceline.core.stats import histogram as row
from paceline.server.metrics import Meter, MetricsPage
from paceline.server.settings import check_bind


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_loopback_needs_no_key(host: str) -> None:
    check_bind(host, None)
    check_bind(host, "a-key-of-16-letters")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "fe80::1", "localhost.example.org", "::ffff:1.2.3.4"])
def test_other_hosts_need_one(host: str) -> None:
    check_bind(host, "a-key-of-16-letters")
    with pytest.raises(ConfigError, match="without an API key"):
        check_bind(host, None)


@pytest.mark.parametrize("key", ["", " key", "k\u00e9y", "a\nb", "a\tb", "fifteen-letters"])
def test_a_key_must_fit_a_header(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        check_bind("127.0.0.1", key)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5))))
def test_histogram_counts_as_prometheus_defines_it(observed: list[tuple[float, int]]) -> None:
    bounds = (0.1, 1.0, 5.0)
    histogram = Histogram(bounds)
    for seconds, times in observed:
        histogram.observe(seconds, times)
    samples = {
        sample.labels.get("le", sample.name): sample.value
        for sample in next(Metrics([row("h", "", lambda counts: counts)], lambda: histogram).collect()).samples
    }
    for bound in bounds:
        assert samples[str(bound)] == sum(times for seconds, times in observed if seconds <= bound)
    assert samples["+Inf"] == samples["h_count"] == sum(times for _, times in observed)
    assert samples["h_sum"] == pytest.approx(sum(seconds * times for seconds, times in observed))


def test_the_page_parses_and_names_what_dashboards_ask_for() -> None:
    meter = Meter()
    meter.answers['/v1/"odd\n', 200] += 1
    families = {family.name for family in text_string_to_metric_families(MetricsPage(ScriptedInference(), meter).render().decode())}
    assert families >= {
        "paceline_ttft_seconds",
        "paceline_inter_token_seconds",
        "paceline_requests_waiting",
        "paceline_requests_running",
        "paceline_kv_blocks_total",
        "paceline_kv_blocks_used",
        "paceline_kv_blocks_cached",
        "paceline_prefix_cache_queries",
        "paceline_prefix_cache_hits",
        "paceline_prompt_tokens",
        "paceline_generated_tokens",
        "paceline_preemptions",
        "paceline_http_responses",
    }
