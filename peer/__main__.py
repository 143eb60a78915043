"""`python -m peer`."""

from __future__ import annotations

import sys

from peer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
