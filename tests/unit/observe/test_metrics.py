"""The list of metrics: names as Prometheus wants them, and a dashboard that knows no others."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pccl.observe.metrics import BUCKETS_S, METRICS, Durations
from tests.support.paths import ROOT

DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"
SERIES = re.compile(r"pccl_\w+")
OF_HISTOGRAMS = re.compile(r"_(bucket|sum|count)$")
LABELS = re.compile(r"\b(?:by|on|without)\s*\(([^)]*)\)|(\w+)\s*(?:=~|!~|!=|=)\s*\"|\{\{(\w+)\}\}")


@pytest.mark.parametrize("name", METRICS)
def test_names_follow_the_rules_of_prometheus(name: str) -> None:
    described = METRICS[name]
    assert re.fullmatch(r"pccl(_[a-z]+)+", name)
    assert name.endswith("_total") == (described.kind == "counter")
    assert described.kind in ("counter", "gauge", "histogram")
    assert described.help.endswith(".")
    assert "name" not in described.labels


def test_durations_fall_into_buckets_with_their_upper_bound() -> None:
    durations = Durations()
    for seconds in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, BUCKETS_S[-1] + 1.0):
        durations.add(seconds)
    assert durations.counts == [2, 1, *[0] * (len(BUCKETS_S) - 2), 1]
    assert durations.sum_s == pytest.approx(BUCKETS_S[0] * 2.01 + BUCKETS_S[-1] + 1.0)


# -- the dashboard ---------------------------------------------------------------------------------


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def queries() -> list[str]:
    """Every query of the dashboard, with the legend, which uses labels."""
    return [
        f"{target['expr']} {target.get('legendFormat', '')}"
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    ]


def test_the_dashboard_asks_for_known_metrics_and_for_all_of_them() -> None:
    texts = [*queries(), json.dumps(dashboard()["templating"])]
    asked = {OF_HISTOGRAMS.sub("", name) for text in texts for name in SERIES.findall(text)}
    assert asked == METRICS.keys()


def test_the_dashboard_uses_labels_that_its_metrics_have() -> None:
    for query in queries():
        names = [OF_HISTOGRAMS.sub("", name) for name in SERIES.findall(query)]
        known = {"name", "instance", "le"}.union(*(METRICS[name].labels for name in names))
        used = {
            label.strip()
            for groups in LABELS.findall(query)
            for label in ",".join(groups).split(",")
            if label.strip()
        }
        assert used <= known, query


def test_panels_do_not_overlap_and_have_titles() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        assert panel["title"]
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
