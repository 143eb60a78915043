"""The paper's configurations by name, as what they fill in where a spec says nothing.

The one thing you would get wrong: Mix1 between pairs has no shared reference to code a difference to, so its codec must
keep whole parameters (bf16 or fp32).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Strategy = Literal["none", "pair", "global"]
CodecName = Literal["fp32", "bf16", "int8", "int4"]
Preset = Literal["diloco", "global-m1", "global-m1-local-m2", "local-m1-m2"]

PRESETS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "diloco": {
        "mix1": {"strategy": "none", "codec": "fp32"},
        "mix2": {"strategy": "global", "codec": "fp32"},
    },
    "global-m1": {
        "mix1": {"strategy": "global", "codec": "int8"},
        "mix2": {"strategy": "none", "codec": "fp32"},
    },
    "global-m1-local-m2": {
        "mix1": {"strategy": "global", "codec": "int8"},
        "mix2": {"strategy": "pair", "codec": "int4"},
    },
    "local-m1-m2": {
        "mix1": {"strategy": "pair", "codec": "bf16"},
        "mix2": {"strategy": "pair", "codec": "int4"},
    },
}
