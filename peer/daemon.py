"""One peer, from start to goodbye: the only place that builds the parts and joins them.

Training has the main thread, networking its own (see network). Order of the end: finish the step, save, tell members,
stop serving, stop the loop; each with a limit. The one thing to get wrong: the run spec. A newcomer takes the swarm's,
a restarted peer has its own in the checkpoint, and only a peer that starts a run makes one.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import json
import os
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import torch

from peer import __version__, checkpoint, log, model, trainer
from peer.agreement import Agreement
from peer.catchup import Asker, Donor, Shelf
from peer.config import Config, RunSpec, Settings, differing, parse_address, spec_fields_set
from peer.course import Course
from peer.data import load_corpus
from peer.errors import JoinError, PeerError, UsageError
from peer.home import Home, open_home
from peer.joining import join
from peer.log import Journal
from peer.membership import Change, Member, Membership, State
from peer.membership import roster as roster_of
from peer.metrics import Metrics, MetricsServer
from peer.mixing import Links, Mixer, Pacer
from peer.network import Network
from peer.outer import Vectors
from peer.probe import Probe
from peer.rounds import Rounds, Stop
from peer.rpc_client import GrpcTransport
from peer.rpc_server import AdminServer, Server
from peer.service import PROTOCOL, Inside, PeerService
from peer.trainer import Trainer
from peer.transport import JoinReply, JoinRequest, StatePosition

T = TypeVar("T")

SERVER_GRACE_S = 1.0
GOODBYE_S = 3.0
RESUME_JOIN_S = 5.0  # how long a restarted peer looks for its swarm before it trains on alone

logger = log.get(__name__)


class Interrupted(PeerError):
    """Asked to end while waiting: leads to an orderly end, not to an error."""

    exit_code = 0


class Daemon:
    """Builds, runs and ends one peer. Everything is called from the main thread but `status`."""

    def __init__(self, config: Config, stop: Stop) -> None:
        self.config = config
        self.stop = stop
        self.settings = config.settings
        self.metrics = Metrics()
        self.position = (-1, 0)  # round, step; read by the loop
        self._step_s = 0.0
        self._started = time.monotonic()
        self.home: Home | None = None
        self.course: Course | None = None
        self._ends = contextlib.ExitStack()

    def run(self) -> None:
        """Run to the end of the run, or until asked to end. Raises PeerError when the peer cannot go on."""
        exit_code = 1
        try:
            self._start()
            assert self.course is not None
            self.course.wait_for_members()
            self.course.run()
            exit_code = 0
        except Interrupted:
            exit_code = 0
        except PeerError as error:
            exit_code = error.exit_code
            raise
        finally:
            self._summarise(exit_code)
            self._ends.close()

    # Starting.

    def _start(self) -> None:
        settings = self.settings
        self.home = home = open_home(Path(settings.storage.dir))
        self._ends.callback(home.close)
        self.network = Network()
        self._ends.callback(self.network.stop)
        if settings.device.threads:
            torch.set_num_threads(settings.device.threads)
        snapshot = self._load_checkpoint(home)
        self._listen()
        reply = self._join(home, snapshot)
        spec, learner = self._run_and_trainer(home, snapshot, reply)
        self._assemble(home, spec, learner, snapshot, reply)

    def _load_checkpoint(self, home: Home) -> checkpoint.Snapshot | None:
        checkpoint.clean(home.checkpoints)
        snapshot = checkpoint.load_latest(home.checkpoints) if self.settings.resume else None
        if snapshot is not None:
            spec = RunSpec.from_json(str(snapshot.meta["spec"]))
            differences = differing(spec_fields_set(self.config), spec.fields())
            if differences:
                lines = "".join(f"\n  {name}: {ours}, there {theirs}" for name, (ours, theirs) in differences.items())
                raise UsageError(
                    f"the checkpoint in {home.path} is of another run; choose another storage.dir, "
                    f"or resume=false to start anew:{lines}"
                )
            logger.info("resuming", round=snapshot.round, step=snapshot.meta.get("step", 0), run=spec.name)
        return snapshot

    def _listen(self) -> None:
        """Take every port before anything slow, so that a port in use is known at once."""
        settings = self.settings
        self.service = PeerService()
        self.transport = self.network.ask(lambda: GrpcTransport(on_drop=self.metrics.dropped))
        self._ends.callback(self._call_at_end, self.transport.close)
        server = self.network.ask(Server)
        listen = parse_address(settings.network.listen)
        port = self.network.call(server.start(self.service, settings.network.listen, self.metrics.dropped))
        self._ends.callback(self._call_at_end, lambda: server.stop(SERVER_GRACE_S))
        host = listen.host if not listen.is_any else outgoing_host()
        bound = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.address = (settings.network.advertise or bound) if settings.network.dialable else ""
        if settings.metrics.listen:
            at = parse_address(settings.metrics.listen)
            served: MetricsServer = self.metrics.serve(at.host, at.port)
            self._ends.callback(served.close)
            logger.info("metrics", url=f"http://{at.host}:{served.port}/metrics")
        admin = AdminServer()
        admin_at = parse_address(settings.admin.listen)
        admin_port = self.network.call(admin.start(lambda: json.dumps(self.status()), settings.admin.listen))
        self._ends.callback(self._call_at_end, admin.stop)
        assert self.home is not None
        self.home.show_admin(f"{admin_at.host}:{admin_port}")
        logger.info("listening", address=bound, others_dial=self.address or "nobody", peer=self.home.id)

    def _join(self, home: Home, snapshot: checkpoint.Snapshot | None) -> JoinReply | None:
        """Ask to be let in; None when this peer starts, or goes on, alone."""
        bootstrap = self.settings.network.bootstrap
        addresses = self._addresses(home)
        if not addresses:
            return None
        fields = spec_fields_set(self.config)
        if snapshot is not None:
            fields = RunSpec.from_json(str(snapshot.meta["spec"])).fields()
        me = Member(home.id, self.address, home.incarnation, State.ALIVE)
        name = self.config.spec.name if "name" in fields else ""
        request = JoinRequest(PROTOCOL, me, name, fields)
        must = bool(bootstrap) and snapshot is None
        timeout_s = self.settings.network.join_timeout if must else RESUME_JOIN_S
        started = time.monotonic()
        try:
            return self._await(join(self.transport, addresses, request, timeout_s))
        except JoinError as error:
            if must:
                raise
            logger.warning("no member answers; going on alone and looking for them", tried=len(error.attempts))
            return None
        finally:
            self.metrics.stall("join", time.monotonic() - started)

    def _addresses(self, home: Home) -> list[str]:
        """Return where members may be found: as configured first, then where they were last."""
        known = dict.fromkeys([*self.settings.network.bootstrap, *home.remembered()])
        return [address for address in known if address != self.address]

    def _run_and_trainer(
        self, home: Home, snapshot: checkpoint.Snapshot | None, reply: JoinReply | None
    ) -> tuple[RunSpec, Trainer]:
        if reply is not None:
            spec = RunSpec.from_json(reply.spec)
        elif snapshot is not None:
            spec = RunSpec.from_json(str(snapshot.meta["spec"]))
        else:
            spec = self.config.spec
        self.config = self.config.adopt(spec)
        spec, learner = begin_training(spec, self.settings, home, starts=reply is None and snapshot is None)
        self._ends.callback(learner.close)
        return spec, learner

    def _assemble(
        self,
        home: Home,
        spec: RunSpec,
        learner: Trainer,
        snapshot: checkpoint.Snapshot | None,
        reply: JoinReply | None,
    ) -> None:
        layout = learner.layout
        size = layout.n_params
        checkpoint.check_space(home.checkpoints, checkpoint.BYTES_PER_PARAM * size, self.settings.checkpoint.keep)
        if snapshot is None:
            z = torch.empty(size)
            learner.read(0, size, z)
            vectors = Vectors(z, torch.zeros(size), z.clone())
        else:
            vectors = snapshot.vectors
        shelf = Shelf.of(layout, vectors)
        network, metrics, settings = self.network, self.metrics, self.settings
        upload = settings.network.upload or 0
        me = Member(home.id, self.address, home.incarnation, State.ALIVE, upload_bps=upload)
        links = Links(spec.key, me.id, self.transport, network.coding, metrics, Pacer(upload))
        self.spec = spec
        addresses = self._addresses(home)

        def build() -> Inside:
            membership = Membership(me)
            mixer = Mixer(links, network.loop)
            probe = Probe(
                membership,
                self.transport,
                spec.key,
                metrics,
                bootstrap=addresses,
                position=lambda: self.position,
                on_changes=lambda changes: self._on_changes(mixer, changes),
            )
            donor = Donor(spec.key, shelf, self._where, network.coding, links.pacer)
            agreement = Agreement(spec.key, me.id, self.transport, network.coding, metrics, spec.probe.top_k)
            return Inside(spec, membership, probe, mixer, donor, agreement, self.transport)

        self.inside = inside = network.ask(build)
        rounds = Rounds(spec, me, learner, shelf, self, metrics, self.stop)
        rounds.mixer, rounds.rate_bps = inside.mixer, settings.network.upload
        self.shelf = shelf
        self.course = course = Course(
            spec,
            settings,
            me.id,
            home,
            learner,
            shelf,
            rounds,
            self,
            metrics,
            self.stop,
            Journal(home.path / "loss.jsonl"),
            Journal(home.path / "rounds.jsonl"),
        )
        self._ends.callback(course.losses.close)
        self._ends.callback(course.journal.close)
        if snapshot is not None:
            course.restore(snapshot)
        else:
            course.forget_journals()
        self._enter(reply)

    def _enter(self, reply: JoinReply | None) -> None:
        """Open the doors, then take the swarm's state or begin with our own."""
        course, inside = self.course, self.inside
        assert course is not None
        if reply is not None:
            self.network.ask(lambda: inside.probe.learn(reply.members))
        self.network.ask(lambda: self.service.open(inside))
        running = self.network.start(inside.probe.run())
        self._ends.callback(self._goodbye)
        self._ends.callback(running.cancel)
        info = {"id": course.me, "run": self.spec.name, "fingerprint": self.spec.fingerprint[:16]}
        self.metrics.info(**info, version=__version__, preset=self.spec.mixing.preset, address=self.address)
        logger.info("in the run", **info, round=course.round, parameters=self.shelf.layout.n_params)
        others = [m for m in (reply.members if reply else ()) if m.id != course.me and m.round >= 0]
        ahead = any(m.round > course.round or (m.round == course.round and not course.step) for m in others)
        if not (others and ahead and course.catch_up()):
            if others and ahead:
                raise JoinError([(m.address, "did not give its state") for m in others if m.address])
            self.publish(course.round, course.step)
            self.take_part_from(course.round)

    # What the course asks of the swarm (course.Swarm, rounds.Others).

    def view(self) -> tuple[Member, ...]:
        return self.network.ask(self.inside.membership.view)

    def roster(self, round_: int) -> tuple[Member, ...]:
        return roster_of(self.view(), round_)

    def publish(self, round_: int, step: int) -> None:
        self.position = (round_, step)

    def take_part_from(self, round_: int) -> None:
        place = {"from_round": round_, "round": self.position[0], "step": self.position[1]}
        self.network.ask(lambda: self.inside.membership.update_me(**place))

    def catch_up(self, donors: list[str]) -> StatePosition | None:
        asker = Asker(self.spec.key, self.shelf, self.transport, self.network.coding, self.metrics)
        return self._await(asker.catch_up(donors))

    def compare(self, round_: int, log_probs: torch.Tensor) -> None:
        roster = self.roster(round_)
        self.network.start(self.inside.agreement.show(round_, log_probs, roster))

    def distance(self, round_: int) -> float | None:
        return self.inside.agreement.distances.get(round_)

    # What others, and the operator, hear of this peer.

    def _where(self) -> StatePosition:
        round_, step = self.position
        return StatePosition(max(round_, 0), step, self._step_s)

    def _on_changes(self, mixer: Mixer, changes: list[Change]) -> None:
        for change in changes:
            if change.member.state is not State.ALIVE:
                mixer.lost(change.member.id)
        assert self.home is not None
        known = [m.address for m in self.inside.membership.members(State.ALIVE, State.SUSPECT) if m.address]
        if known:
            self.home.remember(known)

    def status(self) -> dict[str, Any]:
        """Return what `peer status` shows. From the loop."""
        round_, step = self.position
        course = self.course
        status: dict[str, Any] = {
            "id": self.home.id if self.home else None,
            "pid": os.getpid(),
            "address": getattr(self, "address", None),
            "version": __version__,
            "up_seconds": round(time.monotonic() - self._started, 1),
            "round": round_,
            "step": step,
        }
        if course is not None:
            status |= {
                "run": self.spec.name,
                "fingerprint": self.spec.fingerprint,
                "preset": self.spec.mixing.preset,
                "rounds": self.spec.round.count,
                "steps": self.spec.round.steps,
                "eval_loss": course.eval_loss,
                "members": [_shown(member) for member in self.inside.membership.view()],
                "totals": self.metrics.totals(),
            }
        return status

    def _summarise(self, exit_code: int) -> None:
        """Leave summary.json for the swarm report."""
        if self.home is None or self.course is None:
            return
        course, totals = self.course, self.metrics.totals()
        summary = {
            "id": self.home.id,
            "exit_code": exit_code,
            "preset": self.spec.mixing.preset,
            "run": self.spec.name,
            "fingerprint": self.spec.fingerprint,
            "round": course.round,
            "rounds": totals["rounds"],
            "tokens": totals["tokens"],
            "loss_first": totals["loss_first"],
            "loss_last": totals["loss_last"],
            "eval_loss_last": course.eval_loss,
            "utilization": totals["utilization"],
            "mix1": totals["mix1"],
            "mix2": totals["mix2"],
            "sent_bytes": totals["sent_bytes"],
            "received_bytes": totals["received_bytes"],
            "predicted_sent_bytes": course.planned_bytes,
            "js_distance_last": course.last_js,
            "l2_distance_last": course.last_l2,
            "totals": totals,
        }
        try:
            (self.home.path / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("summary not written", why=str(error))

    # Ending.

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for something on the loop, until asked to end."""
        future = self.network.start(work)
        forget = self.stop.on_ask(future.cancel)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Interrupted("asked to end") from None
        finally:
            forget()

    def _goodbye(self) -> None:
        self._call_at_end(self.inside.probe.leave)

    def _call_at_end(self, work: Any) -> None:
        """Run one part of the end; what takes too long is left behind."""
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            self.network.call(work(), GOODBYE_S)


def begin_training(spec: RunSpec, settings: Settings, home: Home, starts: bool) -> tuple[RunSpec, Trainer]:
    """Build the trainer. The peer that starts the run completes the spec: the tokenizer's digest, the probe tokens."""
    tokenizer = model.load_tokenizer(spec.tokenizer)
    if settings.trainer.kind == "emulated":
        if starts:
            spec = spec.replaced(tokenizer__digest=tokenizer.digest)
        return spec, trainer.EmulatedTrainer(spec, settings, model.shapes(spec, tokenizer), home.id)
    corpus = load_corpus(spec.data, tokenizer, spec.model.context, home.cache)
    if starts:
        ids = corpus.heldout.probe_ids(spec.probe.tokens).numpy().astype("<i4").tobytes()
        spec = spec.replaced(tokenizer__digest=tokenizer.digest, probe__ids=base64.b64encode(ids).decode())
    return spec, trainer.ModelTrainer(spec, settings, model.build(spec, tokenizer), corpus, home.id)


def outgoing_host() -> str:
    """Return this machine's address on the network it would use to reach others. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: only the route is looked up
            return str(probe.getsockname()[0])
        except OSError:
            logger.warning("this machine has no route out: others are told 127.0.0.1; set network.advertise")
            return "127.0.0.1"


def _shown(member: Member) -> dict[str, Any]:
    return {
        "id": member.id,
        "address": member.address,
        "state": member.state.name.lower(),
        "round": member.round,
        "step": member.step,
        "from_round": member.from_round,
        "incarnation": member.incarnation,
    }
