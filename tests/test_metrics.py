"""Metrics: the names are a contract, the values mean what they say, and a scrape never fails."""

from __future__ import annotations

import math
import threading
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from peer.errors import AddressError
from peer.metrics import CAUSES, FRAME_REASONS, Metrics

NAMES = """
peer_info peer_round peer_inner_steps_total peer_tokens_total peer_tokens_per_second peer_train_loss peer_eval_loss
peer_compute_utilization_ratio peer_stall_seconds_total peer_mix_seconds peer_mix_bytes_total peer_mix_raw_bytes_total
peer_mix_chunks_total peer_frames_dropped_total peer_exchanges_total peer_consensus_js_distance
peer_consensus_l2_distance peer_members peer_members_mixed peer_round_lag peer_loop_lag_seconds peer_checkpoint_seconds
peer_checkpoint_age_seconds peer_catchup_seconds
"""


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def scrape(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_the_names_are_those_of_the_contract():
    described = {line.split()[2] for line in scrape(Metrics()).splitlines() if line.startswith("# TYPE peer_")}
    assert described == set(NAMES.split())


def test_the_types_are_as_promised():
    types = {f.name: f.type for f in text_string_to_metric_families(scrape(Metrics()))}
    assert types["peer_mix_seconds"] == "histogram"
    assert types["peer_tokens"] == types["peer_stall_seconds"] == "counter"
    assert types["peer_tokens_per_second"] == types["peer_members"] == "gauge"


def test_every_label_shows_at_zero_from_the_start():
    metrics = Metrics()
    for cause in CAUSES:
        assert value(metrics, "peer_stall_seconds_total", cause=cause) == 0
    for reason in FRAME_REASONS:
        assert value(metrics, "peer_frames_dropped_total", reason=reason) == 0
    for stage in ("mix1", "mix2"):
        assert value(metrics, "peer_mix_seconds_count", stage=stage) == 0
        for outcome in ("mixed", "partial", "local"):
            assert value(metrics, "peer_mix_chunks_total", stage=stage, outcome=outcome) == 0
        for outcome in ("full", "degraded", "failed"):
            assert value(metrics, "peer_exchanges_total", stage=stage, outcome=outcome) == 0
        for direction in ("sent", "received"):
            assert value(metrics, "peer_mix_bytes_total", stage=stage, direction=direction) == 0
            assert value(metrics, "peer_mix_raw_bytes_total", stage=stage, direction=direction) == 0
    for state in ("alive", "suspect", "dead", "left"):
        assert value(metrics, "peer_members", state=state) == 0


@pytest.mark.parametrize(
    "name",
    [
        "peer_train_loss",
        "peer_eval_loss",
        "peer_consensus_js_distance",
        "peer_consensus_l2_distance",
        "peer_checkpoint_seconds",
        "peer_checkpoint_age_seconds",
        "peer_catchup_seconds",
        "peer_tokens_per_second",
        "peer_compute_utilization_ratio",
    ],
)
def test_what_was_never_measured_is_absent(name: str):
    assert value(Metrics(), name) is None


def test_a_distance_to_nobody_is_absent_and_never_nan():
    metrics = Metrics()
    metrics.js(0.25)
    metrics.l2(3.0)
    assert (value(metrics, "peer_consensus_js_distance"), value(metrics, "peer_consensus_l2_distance")) == (0.25, 3.0)
    metrics.js(None)
    metrics.l2(math.nan)
    assert value(metrics, "peer_consensus_js_distance") is None
    assert "NaN" not in scrape(metrics)


def test_training_is_counted():
    metrics = Metrics()
    metrics.info(id="a", version="1", round_steps=50)
    metrics.step(loss=2.5, tokens=100, seconds=0.5)
    metrics.step(loss=2.0, tokens=150, seconds=0.5)
    metrics.at_round(6)
    metrics.round_done(6, utilization=0.75)
    metrics.stall("mix2", 1.5)
    metrics.stall("mix2", 0.5)
    metrics.eval_loss(1.75)
    metrics.catchup(12.0)
    assert value(metrics, "peer_info", id="a", version="1", round_steps="50") == 1
    assert value(metrics, "peer_inner_steps_total") == 2
    assert value(metrics, "peer_tokens_total") == 250
    assert value(metrics, "peer_train_loss") == 2.0
    assert value(metrics, "peer_eval_loss") == 1.75
    assert value(metrics, "peer_round") == 7
    assert value(metrics, "peer_compute_utilization_ratio") == 0.75
    assert value(metrics, "peer_stall_seconds_total", cause="mix2") == 2.0
    assert value(metrics, "peer_catchup_seconds") == 12.0


def test_tokens_per_second_is_wall_time_with_stalls():
    clock = Clock()
    metrics = Metrics(clock)
    for _ in range(100):
        clock.now_s += 1.0
        metrics.step(2.0, 500, seconds=1.0)
    assert value(metrics, "peer_tokens_per_second") == pytest.approx(500)
    clock.now_s += 0.9  # a step is under way
    assert value(metrics, "peer_tokens_per_second") == pytest.approx(500)
    clock.now_s += 60.1  # training stands still
    assert value(metrics, "peer_tokens_per_second") == pytest.approx(500 / 2, rel=0.02)
    clock.now_s += 1e6
    assert 0 <= value(metrics, "peer_tokens_per_second") < 1


def test_half_the_time_stalled_is_half_the_rate():
    clock = Clock()
    metrics = Metrics(clock)
    for _ in range(600):
        clock.now_s += 0.5
        metrics.step(2.0, 500, seconds=0.25)
    assert value(metrics, "peer_tokens_per_second") == pytest.approx(1000, rel=0.01)


def test_mixing_is_counted_by_stage():
    metrics = Metrics()
    metrics.mix("mix2", 0.3)
    metrics.sent("mix1", coded=100, raw=400)
    metrics.received("mix1", coded=50, raw=200)
    metrics.chunks("mix1", "partial", 3)
    metrics.exchange("mix2", "degraded")
    metrics.dropped("late")
    metrics.dropped("checksum", 4)
    assert value(metrics, "peer_mix_seconds_sum", stage="mix2") == 0.3
    assert value(metrics, "peer_mix_seconds_bucket", stage="mix2", le="0.25") == 0
    assert value(metrics, "peer_mix_seconds_bucket", stage="mix2", le="0.5") == 1
    assert value(metrics, "peer_mix_bytes_total", stage="mix1", direction="sent") == 100
    assert value(metrics, "peer_mix_raw_bytes_total", stage="mix1", direction="received") == 200
    assert value(metrics, "peer_mix_chunks_total", stage="mix1", outcome="partial") == 3
    assert value(metrics, "peer_exchanges_total", stage="mix2", outcome="degraded") == 1
    assert value(metrics, "peer_frames_dropped_total", reason="late") == 1
    assert value(metrics, "peer_frames_dropped_total", reason="checksum") == 4


def test_an_undeclared_reason_makes_no_new_series():
    metrics = Metrics()
    metrics.dropped("sender-7 was rude", 2)
    assert value(metrics, "peer_frames_dropped_total", reason="malformed") == 2
    assert "rude" not in scrape(metrics)


def test_the_swarm_is_shown():
    metrics = Metrics()
    metrics.members({"alive": 5, "dead": 1})
    metrics.members({"alive": 4})
    metrics.members_mixed(3)
    metrics.round_lag(2)
    assert value(metrics, "peer_members", state="alive") == 4
    assert value(metrics, "peer_members", state="dead") == 0
    assert value(metrics, "peer_members_mixed") == 3
    assert value(metrics, "peer_round_lag") == 2


def test_a_spike_of_loop_lag_stays_visible_for_a_while():
    metrics = Metrics()
    metrics.loop_lag(0.8)
    for _ in range(59):
        metrics.loop_lag(0.001)
    assert value(metrics, "peer_loop_lag_seconds") == 0.8
    metrics.loop_lag(0.001)
    assert value(metrics, "peer_loop_lag_seconds") == 0.001


def test_the_age_of_a_checkpoint_grows_by_itself():
    clock = Clock()
    metrics = Metrics(clock)
    metrics.checkpoint(1.25)
    clock.now_s += 90.0
    assert value(metrics, "peer_checkpoint_seconds") == 1.25
    assert value(metrics, "peer_checkpoint_age_seconds") == 90.0


def test_totals_sum_up_this_process():
    metrics = Metrics()
    for i in range(40):
        metrics.step(4.0 - i * 0.1, 10, 0.1)
    metrics.nonfinite_step()
    metrics.round_done(0, 0.5)
    metrics.round_done(1, 0.9)
    metrics.sent("mix1", 10, 40)
    metrics.sent("mix2", 5, 40)
    metrics.received("mix2", 7, 40)
    metrics.exchange("mix1", "full")
    metrics.dropped("late", 2)
    totals = metrics.totals()
    assert totals["rounds"] == 2
    assert totals["steps"] == 40
    assert totals["tokens"] == 400
    assert totals["nonfinite_steps"] == 1
    assert totals["loss_first"] == pytest.approx(3.55)  # mean of the first ten steps
    assert totals["loss_last"] == pytest.approx(0.55)
    assert totals["utilization"] == pytest.approx(0.7)
    assert totals["mix1"] == {"full": 1, "degraded": 0, "failed": 0}
    assert (totals["sent_bytes"], totals["received_bytes"]) == (15, 7)
    assert totals["dropped"]["late"] == 2
    assert totals["js_distance"] is None


def test_two_peers_live_in_one_process():
    one, other = Metrics(), Metrics()
    one.step(1.0, 10, 0.1)
    assert value(one, "peer_inner_steps_total") == 1
    assert value(other, "peer_inner_steps_total") == 0


def test_the_port_is_free_as_soon_as_the_server_is_closed():
    port = 0
    for _ in range(4):
        server = Metrics().serve("127.0.0.1", port)
        port = server.port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            assert b"peer_inner_steps_total 0.0" in reply.read()
        server.close()
        server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "not.a.host.invalid"])
def test_a_port_that_cannot_be_served_is_named(host: str):
    server = Metrics().serve("127.0.0.1", 0)
    try:
        with pytest.raises(AddressError, match=rf"metrics\.listen.*{host}:{server.port}"):
            Metrics().serve(host, server.port)
    finally:
        server.close()


def test_a_scrape_never_fails_while_everything_changes():
    metrics = Metrics()
    stop = threading.Event()

    def churn() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            metrics.step(1.0, 10, 0.001)
            metrics.info(round=n)
            metrics.loop_lag(0.001)
            metrics.members({"alive": n})
            metrics.js(None if n % 2 else 0.5)
            metrics.checkpoint(0.1)
            metrics.mix("mix1", 0.1)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(50):
            assert "peer_inner_steps_total" in scrape(metrics)
            metrics.totals()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
