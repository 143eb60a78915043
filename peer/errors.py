"""Every error this package raises on purpose, drawn as a tree.

    PeerError                       exit 1   something ended the peer
    |-- UsageError                  exit 2   the operator can mend it: wrong command line, file, port, disk
    |   |-- ConfigError             exit 2   one configuration field, its value and what would do
    |   |-- DataError               exit 2   corpus, tokenizer or model folder unusable
    |   `-- AddressError            exit 2   an address cannot be parsed, bound or is in use
    |-- JoinError                   exit 3   no bootstrap address answered
    |-- RefusedError                exit 4   the swarm answered, and said no
    |-- TrainingError               exit 1   the loss or the gradients are beyond repair
    |-- CheckpointError             exit 1   a checkpoint cannot be written or read
    |-- TransportError                       a link failed: the caller degrades, never the operator's business
    |   |-- Unreachable                      nobody answers there
    |   |-- StreamClosed                     the other side ended or reset the stream
    |   `-- Declined                         the other side answered: not in this round
    `-- FrameError                           what arrived is malformed; carries the reason it is counted under

Three readers: the operator (fix this), the caller (try someone else), the developer (a plain assert: our bug).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class PeerError(Exception):
    """Root of the tree. `exit_code` is what the command line exits with."""

    exit_code = 1


class UsageError(PeerError):
    """The operator can mend it."""

    exit_code = 2


class ConfigError(UsageError):
    """One configuration field is wrong. The message names the field, the value and what would do."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class DataError(UsageError):
    """The corpus, the tokenizer or the model cannot be used as given."""


class AddressError(UsageError):
    """An address cannot be parsed, resolved or bound."""


class JoinError(PeerError):
    """No bootstrap address let this peer in. `attempts` holds (address, reason) pairs."""

    exit_code = 3

    def __init__(self, attempts: Sequence[tuple[str, str]], problem: str = "no bootstrap address answered") -> None:
        self.attempts = tuple(attempts)
        lines = "".join(f"\n  {address}: {reason}" for address, reason in self.attempts)
        super().__init__(f"{problem}:{lines}")


class RefusedError(PeerError):
    """The swarm refused this peer. `fields` maps each differing field to (ours, theirs)."""

    exit_code = 4

    def __init__(self, reason: str, fields: Mapping[str, tuple[str, str]] | None = None) -> None:
        self.reason = reason
        self.fields = dict(fields or {})
        lines = "".join(f"\n  {name}: ours {a}, the swarm's {b}" for name, (a, b) in sorted(self.fields.items()))
        super().__init__(f"refused by the swarm: {reason}{lines}")


class TrainingError(PeerError):
    """Training cannot go on."""


class CheckpointError(PeerError):
    """A checkpoint cannot be written, or what is there cannot be read."""


class TransportError(PeerError):
    """A link failed. Callers degrade; nothing above mixing, probe and catchup sees this."""


class Unreachable(TransportError):
    """Nobody answers at that address."""


class StreamClosed(TransportError):
    """The other side ended or reset the stream."""


class Declined(TransportError):
    """The other side answered that it does not take part. `round` is where it is, -1 if it does not say."""

    def __init__(self, reason: str, round_: int = -1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.round = round_


class FrameError(PeerError):
    """What arrived is malformed. `reason` is a label of peer_frames_dropped_total."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
