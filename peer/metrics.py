"""Every metric a peer shows, on a registry of its own, so that two peers can live in one process.

Methods may be called from any thread and are cheap enough for every step. The one thing to get wrong: a scrape runs in
a thread of its own, so what it reads is a number or sits behind the lock, never somebody's live dictionary; and a value
nobody has measured yet is absent, not zero and not NaN.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from peer.errors import AddressError

STAGES = ("mix1", "mix2")
CAUSES = ("mix2", "mix1", "checkpoint", "eval", "data", "catchup", "join")
CHUNK_OUTCOMES = ("mixed", "partial", "local")
EXCHANGE_OUTCOMES = ("full", "degraded", "failed")
DIRECTIONS = ("sent", "received")
MEMBER_STATES = ("alive", "suspect", "dead", "left")
FRAME_REASONS = (
    "malformed",
    "oversized",
    "foreign_run",
    "foreign_round",
    "stage",
    "unplanned",
    "codec",
    "size",
    "checksum",
    "duplicate",
    "late",
    "nonfinite",
    "reference",
)
_MIX_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_RATE_WINDOW_S = 60.0
_LOSSES_AVERAGED = 10  # one step's loss is too noisy to compare two runs by
_LAGS_KEPT = 60  # measured about twice a second: a spike stays visible for two scrapes


class MetricsServer:
    """The HTTP server behind /metrics. `port` is the bound one."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        try:
            self._httpd, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise AddressError(f"metrics.listen: cannot listen on {host}:{port}: {error}") from error
        self.port: int = self._httpd.server_port

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._httpd.shutdown()
        self._httpd.server_close()  # shutdown alone leaves the socket listening
        self._thread.join()


class _Reading(Collector):
    """A gauge read at each scrape; described, but without a sample while there is nothing to tell."""

    def __init__(
        self, registry: CollectorRegistry, name: str, documentation: str, read: Callable[[], float | None]
    ) -> None:
        self._name, self._documentation, self._read = name, documentation, read
        registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(self._name, self._documentation, value=self._read())


class _TokenRate:
    """Tokens per second of wall time over the last minute, stalls included. Not thread-safe."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=4096)  # (time, tokens so far)

    def add(self, now_s: float, tokens: int, seconds: float) -> None:
        if not self._ends:
            self._ends.append((now_s - seconds, 0))
        self._ends.append((now_s, self._ends[-1][1] + tokens))
        while len(self._ends) > 2 and self._ends[1][0] < now_s - _RATE_WINDOW_S:
            self._ends.popleft()

    def read(self, now_s: float) -> float | None:
        if not self._ends:
            return None
        (first_s, before), (last_s, after) = self._ends[0], self._ends[-1]
        usual_s = (last_s - first_s) / (len(self._ends) - 1)
        # A step under way for no longer than usual is no stall; one that takes longer brings the rate down.
        span_s = max(last_s, now_s - usual_s) - first_s
        return (after - before) / span_s if span_s > 0 else None


class Metrics:
    """What happened in this process's life. Counters start at zero with the process, resumed or not."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one extra series per counter that nobody reads
        self.registry = CollectorRegistry()
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: dict[str, float | None] = {}
        self._rate = _TokenRate()
        self._lags: deque[float] = deque(maxlen=_LAGS_KEPT)
        self._first_losses: list[float] = []
        self._last_losses: deque[float] = deque(maxlen=_LOSSES_AVERAGED)
        self._utilizations = (0.0, 0)  # sum, rounds
        self._nonfinite_steps = 0
        self._saved_at_s: float | None = None
        self._declare_training()
        self._declare_mixing()
        self._declare_swarm()
        ProcessCollector(registry=self.registry)

    def _declare_training(self) -> None:
        self._info = Info("peer", "Who this peer is and what it runs.", registry=self.registry)
        self._round = Gauge("peer_round", "Round this peer is in.", registry=self.registry)
        self._steps = Counter("peer_inner_steps_total", "Inner optimizer steps applied.", registry=self.registry)
        self._tokens = Counter("peer_tokens_total", "Tokens trained on.", registry=self.registry)
        rate = "Tokens trained on per second of wall time, stalls included, over the last minute."
        self._reading("peer_tokens_per_second", rate, self._read_rate)
        self._reading("peer_train_loss", "Loss of the last inner step, nats per token.")
        self._reading("peer_eval_loss", "Held-out loss at the last evaluation, nats per token.")
        utilization = "Time in inner steps divided by wall time, over the last round."
        self._reading("peer_compute_utilization_ratio", utilization)
        stalls = Counter("peer_stall_seconds_total", "Time training stood still.", ["cause"], registry=self.registry)
        self._stalls = {cause: stalls.labels(cause) for cause in CAUSES}
        self._reading("peer_checkpoint_seconds", "How long saving the last checkpoint took.")
        self._reading("peer_checkpoint_age_seconds", "Time since the last checkpoint was saved.", self._read_age)
        self._reading("peer_catchup_seconds", "How long the last catch-up with the swarm took.")

    def _declare_mixing(self) -> None:
        registry = self.registry
        stage, flow = ["stage"], ["stage", "direction"]
        seconds = Histogram(
            "peer_mix_seconds", "From start to end of an exchange.", stage, buckets=_MIX_BUCKETS, registry=registry
        )
        self._mix = {s: seconds.labels(s) for s in STAGES}
        coded = Counter("peer_mix_bytes_total", "Bytes of coded chunks on the wire.", flow, registry=registry)
        raw = Counter("peer_mix_raw_bytes_total", "What these chunks would take as fp32.", flow, registry=registry)
        self._coded = {(s, d): coded.labels(s, d) for s in STAGES for d in DIRECTIONS}
        self._raw = {(s, d): raw.labels(s, d) for s in STAGES for d in DIRECTIONS}
        chunks = Counter(
            "peer_mix_chunks_total",
            "Chunks by what became of them: mixed with everybody planned, with some (partial), with nobody (local).",
            ["stage", "outcome"],
            registry=registry,
        )
        self._chunks = {(s, o): chunks.labels(s, o) for s in STAGES for o in CHUNK_OUTCOMES}
        dropped = Counter("peer_frames_dropped_total", "Frames not used, by reason.", ["reason"], registry=registry)
        self._dropped = {reason: dropped.labels(reason) for reason in FRAME_REASONS}
        exchanges = Counter(
            "peer_exchanges_total",
            "Exchanges by outcome: every chunk fully mixed, some (degraded), none (failed).",
            ["stage", "outcome"],
            registry=registry,
        )
        self._exchanges = {(s, o): exchanges.labels(s, o) for s in STAGES for o in EXCHANGE_OUTCOMES}

    def _declare_swarm(self) -> None:
        js = "Mean Jensen-Shannon distance (0 to 1) between this peer's output and other members', last round."
        self._reading("peer_consensus_js_distance", js)
        l2 = "Euclidean distance between this peer's parameters and those of the members it mixed with."
        self._reading("peer_consensus_l2_distance", l2)
        members = Gauge("peer_members", "Members known, this peer included.", ["state"], registry=self.registry)
        self._members = {state: members.labels(state) for state in MEMBER_STATES}
        self._mixed = Gauge(
            "peer_members_mixed", "Members averaged last round, this peer included.", registry=self.registry
        )
        self._lag = Gauge("peer_round_lag", "Rounds behind the swarm's median.", registry=self.registry)
        lag = "How late the network loop's timer fired at worst, over the last half minute."
        self._reading("peer_loop_lag_seconds", lag, self._read_lag)

    def _reading(self, name: str, documentation: str, read: Callable[[], float | None] | None = None) -> None:
        _Reading(self.registry, name, documentation, read or (lambda: self._latest.get(name)))

    def _read_rate(self) -> float | None:
        with self._lock:
            return self._rate.read(self._clock())

    def _read_age(self) -> float | None:
        saved_at_s = self._saved_at_s
        return None if saved_at_s is None else max(0.0, self._clock() - saved_at_s)

    def _read_lag(self) -> float | None:
        with self._lock:
            return max(self._lags, default=None)

    def _set(self, name: str, value: float | None) -> None:
        """Remember the latest value; what is not finite is not a measurement."""
        self._latest[name] = value if value is not None and math.isfinite(value) else None

    # training

    def info(self, **labels: object) -> None:
        self._info.info({name: str(value) for name, value in labels.items()})

    def step(self, loss: float, tokens: int, seconds: float) -> None:
        self._steps.inc()
        self._tokens.inc(tokens)
        self._set("peer_train_loss", loss)
        with self._lock:
            self._rate.add(self._clock(), tokens, seconds)
            if math.isfinite(loss):
                self._last_losses.append(loss)
                if len(self._first_losses) < _LOSSES_AVERAGED:
                    self._first_losses.append(loss)

    def nonfinite_step(self) -> None:
        """Count a step that was skipped, for the summary."""
        with self._lock:
            self._nonfinite_steps += 1

    def at_round(self, round_: int) -> None:
        """Say which round the peer is in, for those moments (start, resume, catch-up) when no round has just ended."""
        self._round.set(round_)

    def round_done(self, round_: int, utilization: float) -> None:
        """Count the end of `round_`; the peer is in the next one now."""
        self._round.set(round_ + 1)
        self._set("peer_compute_utilization_ratio", utilization)
        with self._lock:
            total, rounds = self._utilizations
            self._utilizations = (total + utilization, rounds + 1)

    def stall(self, cause: str, seconds: float) -> None:
        self._stalls[cause].inc(max(0.0, seconds))

    def eval_loss(self, value: float) -> None:
        self._set("peer_eval_loss", value)

    def checkpoint(self, seconds: float) -> None:
        """Note that a checkpoint has just been saved, and how long that took."""
        self._set("peer_checkpoint_seconds", seconds)
        self._saved_at_s = self._clock()

    def catchup(self, seconds: float) -> None:
        self._set("peer_catchup_seconds", seconds)

    # mixing

    def mix(self, stage: str, seconds: float) -> None:
        self._mix[stage].observe(seconds)

    def sent(self, stage: str, coded: int, raw: int) -> None:
        self._coded[stage, "sent"].inc(coded)
        self._raw[stage, "sent"].inc(raw)

    def received(self, stage: str, coded: int, raw: int) -> None:
        self._coded[stage, "received"].inc(coded)
        self._raw[stage, "received"].inc(raw)

    def chunks(self, stage: str, outcome: str, n: int) -> None:
        self._chunks[stage, outcome].inc(n)

    def dropped(self, reason: str, n: int = 1) -> None:
        """Count frames not used. A reason nobody declared counts as malformed: labels stay few."""
        self._dropped.get(reason, self._dropped["malformed"]).inc(n)

    def exchange(self, stage: str, outcome: str) -> None:
        self._exchanges[stage, outcome].inc()

    # the swarm

    def js(self, value: float | None) -> None:
        """Set the distance; None when there is nobody to compare with."""
        self._set("peer_consensus_js_distance", value)

    def l2(self, value: float | None) -> None:
        """Set the distance; None when there is nobody to compare with."""
        self._set("peer_consensus_l2_distance", value)

    def members(self, counts: Mapping[str, int]) -> None:
        for state, gauge in self._members.items():
            gauge.set(counts.get(state, 0))

    def members_mixed(self, n: int) -> None:
        self._mixed.set(n)

    def round_lag(self, rounds: int) -> None:
        self._lag.set(rounds)

    def loop_lag(self, seconds: float) -> None:
        with self._lock:
            self._lags.append(max(0.0, seconds))

    # ways out

    def serve(self, host: str, port: int) -> MetricsServer:
        """Serve /metrics; port 0 takes a free one. Raises AddressError."""
        return MetricsServer(host, port, self.registry)

    def totals(self) -> dict[str, Any]:
        """Return what a summary needs, as JSON: sums of this process's life, latest values, None where unmeasured."""
        families = [family for family in self.registry.collect() if family.name.startswith("peer")]
        seen = {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}
        with self._lock:
            first, last = list(self._first_losses), list(self._last_losses)
            (utilization, rounds), nonfinite = self._utilizations, self._nonfinite_steps
        exchanges = {s: {o: int(seen["peer_exchanges_total", (s, o)]) for o in EXCHANGE_OUTCOMES} for s in STAGES}
        return {
            "rounds": rounds,
            "steps": int(seen["peer_inner_steps_total", ()]),
            "nonfinite_steps": nonfinite,
            "tokens": int(seen["peer_tokens_total", ()]),
            "tokens_per_second": self._read_rate(),
            "loss_first": sum(first) / len(first) if first else None,
            "loss_last": sum(last) / len(last) if last else None,
            "eval_loss": self._latest.get("peer_eval_loss"),
            "utilization": utilization / rounds if rounds else None,
            "stall_seconds": {cause: seen["peer_stall_seconds_total", (cause,)] for cause in CAUSES},
            **exchanges,
            "sent_bytes": sum(int(seen["peer_mix_bytes_total", (s, "sent")]) for s in STAGES),
            "received_bytes": sum(int(seen["peer_mix_bytes_total", (s, "received")]) for s in STAGES),
            "dropped": {reason: int(seen["peer_frames_dropped_total", (reason,)]) for reason in FRAME_REASONS},
            "js_distance": self._latest.get("peer_consensus_js_distance"),
            "l2_distance": self._latest.get("peer_consensus_l2_distance"),
        }
