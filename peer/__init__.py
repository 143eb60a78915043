"""Train one language model on many machines over slow, unreliable links, with no coordinator.

Only the version lives here. Importing `peer` must stay free: no torch, no grpc, nothing read or started.
"""

from __future__ import annotations

__version__ = "0.1.0"
