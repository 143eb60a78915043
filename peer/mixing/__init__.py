"""Runs a plan: contribute, reduce, finalise.

quantity   what is mixed, and every write into the vectors
exchange   what both shapes share; direct and owned are the shapes
mixer      the exchanges of one peer, seen from the training thread and from incoming streams
"""

from __future__ import annotations

from peer.mixing.exchange import Links, Outcome, Pacer
from peer.mixing.mixer import Mix, Mixer
from peer.mixing.quantity import OuterGradients, StartingPoints

__all__ = ["Links", "Mix", "Mixer", "Outcome", "OuterGradients", "Pacer", "StartingPoints"]
