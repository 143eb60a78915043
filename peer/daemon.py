"""One peer, from start to goodbye: the only place that builds the parts and joins them.

Training has the main thread, networking its own (see network). Order of the end: finish the step, save, tell members,
stop serving, stop the loop; each with a limit. The one thing to get wrong: the run spec. A newcomer takes the swarm's,
a restarted peer has its own in the checkpoint, and only a peer that starts a run makes one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from peer import __version__, checkpoint, log, status, wire
from peer.agreement import Agreement
from peer.catchup import Asker, Donor, Shelf
from peer.config import Config, RunSpec, differing, parse_address, spec_fields_set
from peer.course import Course
from peer.errors import CheckpointError, JoinError, PeerError, UsageError
from peer.home import Home, open_home
from peer.joining import check_paths, join
from peer.learner import begin_training, first_vectors
from peer.log import Journal
from peer.membership import Change, Member, Membership, State
from peer.metrics import Metrics
from peer.mixing import Links, Mixer, Pacer
from peer.neighbours import Interrupted, Neighbours, wait_unless_asked
from peer.network import Network
from peer.probe import Probe
from peer.rounds import Rounds
from peer.rpc_client import GrpcTransport
from peer.rpc_server import AdminServer, Server
from peer.service import PROTOCOL, Inside, PeerService
from peer.trainer import Trainer
from peer.transport import JoinReply, JoinRequest, StatePosition
from peer.waiting import Stop

SERVER_GRACE_S = 1.0
GOODBYE_S = 3.0
RESUME_JOIN_S = 5.0  # how long a restarted peer looks for its swarm before it trains on alone

logger = log.get(__name__)


class Daemon:
    """Builds, runs and ends one peer. Everything is called from the main thread but `status`."""

    def __init__(self, config: Config, stop: Stop) -> None:
        self.config = config
        self.settings = config.settings
        self.stop = stop
        self.metrics = Metrics()
        self.service = PeerService()
        self._began = time.monotonic()
        self._home: Home | None = None
        self._address = ""
        self._course: tuple[RunSpec, Course, Neighbours] | None = None
        self._ends = contextlib.ExitStack()

    def run(self) -> None:
        """Run to the end of the run, or until asked to end. Raises PeerError when the peer cannot go on."""
        exit_code = 1
        try:
            course = self._start()
            course.wait_for_members()
            course.run()
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

    def _start(self) -> Course:
        settings = self.settings
        home = self._home = open_home(Path(settings.storage.dir))
        self._ends.callback(home.close)
        if settings.device.threads:
            torch.set_num_threads(settings.device.threads)
        network = self._network = Network()
        self._ends.callback(network.stop)
        snapshot = self._load_checkpoint(home)
        self._listen(home)
        reply = self._join(home, snapshot)
        if reply is not None:
            spec = RunSpec.from_json(reply.spec)
            check_paths(self.config, spec)
        else:
            spec = spec_of(snapshot) if snapshot is not None else self.config.spec
        self.config.adopt(spec)  # settings that do not fit the swarm's spec are the operator's to mend
        spec, learner = begin_training(spec, settings, home, starts=reply is None and snapshot is None)
        self._ends.callback(learner.close)
        return self._assemble(home, spec, learner, snapshot, reply)

    def _load_checkpoint(self, home: Home) -> checkpoint.Snapshot | None:
        checkpoint.clean(home.checkpoints)
        snapshot = checkpoint.load_latest(home.checkpoints) if self.settings.resume else None
        if snapshot is not None:
            spec = spec_of(snapshot)
            differences = differing(spec_fields_set(self.config), spec.fields())
            if differences:
                lines = "".join(f"\n  {name}: {ours}, there {theirs}" for name, (ours, theirs) in differences.items())
                raise UsageError(
                    f"the checkpoint in {home.path} is of another run; choose another storage.dir, "
                    f"or resume=false to start anew:{lines}"
                )
            logger.info("resuming", round=snapshot.round, step=snapshot.meta.get("step", 0), run=spec.name)
        return snapshot

    def _listen(self, home: Home) -> None:
        """Take every port before anything slow, so that a port in use is known at once."""
        settings, network = self.settings, self._network
        self._transport = network.ask(lambda: GrpcTransport(on_drop=self.metrics.dropped))
        self._ends.callback(self._at_end, self._transport.close)
        self._server = server = network.ask(Server)
        listen = parse_address(settings.network.listen)
        port = network.call(server.start(self.service, settings.network.listen, self.metrics.dropped))
        self._ends.callback(self._at_end, lambda: server.stop(SERVER_GRACE_S))
        host = outgoing_host() if listen.is_any else listen.host
        bound = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._address = (settings.network.advertise or bound) if settings.network.dialable else ""
        if settings.metrics.listen:
            at = parse_address(settings.metrics.listen)
            served = self.metrics.serve(at.host, at.port)
            self._ends.callback(served.close)
            logger.info("metrics", url=f"http://{at.host}:{served.port}/metrics")
        admin = AdminServer()
        admin_at = parse_address(settings.admin.listen)
        admin_port = network.call(admin.start(lambda: json.dumps(self.status()), settings.admin.listen))
        self._ends.callback(self._at_end, admin.stop)
        home.show_admin(f"{admin_at.host}:{admin_port}")
        logger.info("listening", address=bound, others_dial=self._address or "nobody", peer=home.id)

    def _addresses(self, home: Home) -> list[str]:
        """Return where members may be found: as configured first, then where they were last."""
        remembered = home.remembered() if self.settings.resume else []
        known = dict.fromkeys([*self.settings.network.bootstrap, *remembered])
        return [address for address in known if address != self._address]

    def _join(self, home: Home, snapshot: checkpoint.Snapshot | None) -> JoinReply | None:
        """Ask to be let in; None when this peer starts, or goes on, alone."""
        addresses = self._addresses(home)
        if not addresses:
            return None
        fields = spec_fields_set(self.config) if snapshot is None else spec_of(snapshot).fields()
        me = Member(home.id, self._address, home.incarnation, State.ALIVE)
        request = JoinRequest(PROTOCOL, me, self.config.spec.name if "name" in fields else "", fields)
        must = bool(self.settings.network.bootstrap) and snapshot is None
        timeout_s = self.settings.network.join_timeout if must else RESUME_JOIN_S
        started = time.monotonic()
        try:
            return wait_unless_asked(self._network, self.stop, join(self._transport, addresses, request, timeout_s))
        except JoinError as error:
            if must:
                raise
            logger.warning("no member answers; going on alone and looking for them", tried=len(error.attempts))
            return None
        finally:
            self.metrics.stall("join", time.monotonic() - started)

    def _assemble(
        self, home: Home, spec: RunSpec, learner: Trainer, snapshot: checkpoint.Snapshot | None, reply: JoinReply | None
    ) -> Course:
        settings, network, metrics, transport = self.settings, self._network, self.metrics, self._transport
        layout = learner.layout
        check_space(home, layout.n_params, settings.checkpoint.keep)
        shelf = Shelf.of(layout, first_vectors(learner) if snapshot is None else snapshot.vectors)
        frame = wire.frame_bytes(4 * max(chunk.size for chunk in layout.chunks), len(layout.chunks))
        me = Member(home.id, self._address, home.incarnation, State.ALIVE, upload_bps=settings.network.upload or 0)
        links = Links(spec.key, me.id, transport, network.coding, metrics, Pacer(settings.network.upload or 0))
        addresses = self._addresses(home)

        def build() -> tuple[Inside, Neighbours]:
            transport.max_frame_bytes = self._server.max_frame_bytes = frame
            membership = Membership(me)
            mixer = Mixer(links, network.loop, lambda id_: m.round if (m := membership.get(id_)) else None)
            agreement = Agreement(spec.key, me.id, transport, network.coding, metrics, spec.probe.top_k)
            neighbours = Neighbours(
                network,
                self.stop,
                membership,
                agreement,
                Asker(spec.key, shelf, transport, network.coding, metrics),
                spec.round.count,
            )

            def on_changes(changes: list[Change]) -> None:
                for change in changes:
                    if change.member.state is not State.ALIVE:
                        mixer.lost(change.member.id)
                home.remember(m.address for m in membership.members(State.ALIVE, State.SUSPECT) if m.address)

            probe = Probe(
                membership,
                transport,
                spec.key,
                metrics,
                bootstrap=addresses,
                position=lambda: neighbours.position,
                on_changes=on_changes,
            )
            donor = Donor(spec.key, shelf, lambda: where(neighbours), network.coding, links.pacer)
            return Inside(spec, membership, probe, mixer, donor, agreement, transport), neighbours

        inside, neighbours = network.ask(build)
        rounds = Rounds(spec, me, learner, shelf, neighbours, metrics, self.stop)
        rounds.mixer, rounds.rate_bps = inside.mixer, settings.network.upload
        losses, journal = Journal(home.path / "loss.jsonl"), Journal(home.path / "rounds.jsonl")
        self._ends.callback(losses.close)
        self._ends.callback(journal.close)
        course = Course(
            spec, settings, me.id, home, learner, shelf, rounds, neighbours, metrics, self.stop, losses, journal
        )
        if snapshot is not None:
            course.restore(snapshot)
        else:
            course.forget_journals()
        self._course = (spec, course, neighbours)
        self._enter(spec, course, inside, reply)
        return course

    def _enter(self, spec: RunSpec, course: Course, inside: Inside, reply: JoinReply | None) -> None:
        """Open the doors, then take the swarm's state or begin with our own."""
        network = self._network
        known = reply.members if reply is not None else ()
        network.ask(lambda: inside.probe.learn(known))
        network.ask(lambda: self.service.open(inside))
        running = network.start(inside.probe.run())
        running.add_done_callback(tell_if_broken)
        self._ends.callback(self._at_end, inside.probe.leave)
        self._ends.callback(running.cancel)
        info = {"id": course.me, "run": spec.name, "fingerprint": spec.fingerprint[:16]}
        self.metrics.info(**info, version=__version__, preset=spec.mixing.preset, address=self._address)
        others = [member for member in known if member.id != course.me and member.round >= 0]
        behind = any(m.round > course.round or (m.round == course.round and not course.step) for m in others)
        if not (behind and self._take_state(course, others)):
            course.swarm.publish(course.round, course.step)
            course.swarm.take_part_from(course.round)
        logger.info("in the run", **info, round=course.round, parameters=course.shelf.layout.n_params)

    def _take_state(self, course: Course, others: list[Member]) -> bool:
        """Take the swarm's state; False where nobody gives it and ours is worth going on with. Raises JoinError."""
        give_up_at = time.monotonic() + self.settings.network.join_timeout
        while not course.catch_up():
            if course.round > 0 or course.step > 0:
                return False
            if time.monotonic() > give_up_at:
                silent = [(member.address, "did not give it whole") for member in others if member.address]
                raise JoinError(silent, "no member gave its state")
            if self.stop.asked.wait(1.0):
                raise Interrupted("asked to end")
        return True

    # Telling.

    def status(self) -> dict[str, Any]:
        """Return what `peer status` shows. From the loop."""
        told = status.starting(self._home.id if self._home else "", self._address, time.monotonic() - self._began)
        if self._course is not None:
            spec, course, neighbours = self._course
            told |= status.running(spec, course, neighbours.position, neighbours.membership.view())
        return told

    def _summarise(self, exit_code: int) -> None:
        """Leave summary.json for the swarm report."""
        if self._home is None or self._course is None:
            return
        spec, course, _ = self._course
        text = json.dumps(status.summary(self._home.id, exit_code, spec, course), indent=1)
        try:
            (self._home.path / "summary.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            logger.warning("summary not written", why=str(error))

    def _at_end(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run one part of the end; what takes too long is left behind."""
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            self._network.call(work(), GOODBYE_S)


def check_space(home: Home, n_params: int, keep: int) -> None:
    """Raise UsageError now rather than fail at the first save, hours later."""
    try:
        checkpoint.check_space(home.checkpoints, checkpoint.BYTES_PER_PARAM * n_params, keep)
    except CheckpointError as error:
        raise UsageError(str(error)) from None


def spec_of(snapshot: checkpoint.Snapshot) -> RunSpec:
    """Return the run spec a checkpoint was made under."""
    return RunSpec.from_json(str(snapshot.meta["spec"]))


def where(neighbours: Neighbours) -> StatePosition:
    """Return where this peer is, as a donor tells it."""
    round_, step = neighbours.position
    return StatePosition(max(round_, 0), step, 0.0)


def tell_if_broken(running: Future[None]) -> None:
    """Log why the probe ended, if it should not have."""
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("the probe broke off; members will believe this peer dead", why=repr(error))


def outgoing_host() -> str:
    """Return this machine's address on the network it would use to reach others. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: only the route is looked up
            return str(probe.getsockname()[0])
        except OSError:
            logger.warning("this machine has no route out: others are told 127.0.0.1; set network.advertise")
            return "127.0.0.1"
