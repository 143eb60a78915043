"""The run spec: what all peers of a run must agree on, immutable and known by its hash.

Any member gives it to a joiner as canonical JSON, so it holds no local path of anybody's in particular, no code and no
switch that makes a library load code. The one thing you would get wrong: the stored spec has presets already resolved;
two specs are the same run if and only if their canonical texts are equal.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from peer.config.complain import config_error
from peer.config.presets import PRESETS, CodecName, Preset, Strategy
from peer.config.sections import Bytes, Deadline, Section, flatten, matching
from peer.errors import ConfigError

OPEN_KEYS = frozenset({"model.config"})  # sections whose keys are the model's business
MAX_SPEC_BYTES = 1 << 20  # a spec from the network larger than this is not read

# Small enough to learn the shape of source code in minutes on two cores, large enough to have every kind of block.
SMALL_LLAMA: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}

# Keys that make transformers fetch or run code, or that hide what is built; a spec comes from strangers.
_CODE_KEYS = frozenset(
    {"auto_map", "trust_remote_code", "attn_implementation", "experts_implementation", "quantization_config"}
)


def _check_model_config(config: dict[str, Any]) -> dict[str, Any]:
    _check_plain(config, depth=0)
    return config


def _check_plain(value: Any, depth: int) -> None:
    if depth > 8:
        raise ValueError("must not be nested deeper than 8 levels")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]*", key):
                raise ValueError(f"must have keys of letters, digits and underscores, got {key!r}")
            if key in _CODE_KEYS or key.startswith("use_kernels"):
                raise ValueError(f"must not set {key}: a run spec never names code to load")
            _check_plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must hold finite numbers, got {value}")
    elif not isinstance(value, str | int | float | bool | None):
        raise ValueError(f"must hold plain JSON values, got {value!r}")


class ModelSpec(Section):
    """What is trained."""

    path: str = Field(
        default="", description='Folder or hub name of a causal language model. "" builds one from type and config.'
    )
    type: Annotated[str, matching(r"[a-z0-9][a-z0-9_-]*", 'a transformers model type such as "llama"')] = Field(
        default="llama",
        description="transformers model type to build when there is no path.",
    )
    config: Annotated[dict[str, Any], AfterValidator(_check_model_config)] = Field(
        default_factory=lambda: dict(SMALL_LLAMA),
        description="Fields of the transformers configuration. Those given replace single fields of the small Llama, "
        "or of the folder's own configuration.",
    )
    context: int = Field(
        default=64,
        ge=2,
        le=1 << 20,
        description="Tokens the model sees at once. More is slower and takes more memory.",
    )
    pretrained: bool = Field(
        default=False, description="Start from the weights at path. Otherwise only its configuration is used."
    )

    @model_validator(mode="before")
    @classmethod
    def _small_llama(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("path") or data.get("type", "llama") != "llama":
            return {"config": {}, **data} if isinstance(data, dict) else data
        config = data.get("config", {})
        return {**data, "config": {**SMALL_LLAMA, **config}} if isinstance(config, dict) else data

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        if self.pretrained and not self.path:
            raise ValueError("pretrained must be false unless path names a model, got true")
        for key in ("max_position_embeddings", "n_positions"):
            table = self.config.get(key)
            if isinstance(table, int) and table < self.context:
                raise ValueError(f"context must be <= config.{key} ({table}), got {self.context}")
        return self


class TokenizerSpec(Section):
    """How text becomes tokens."""

    path: str = Field(
        default="bytes", min_length=1, description='Folder or hub name of a tokenizer. "bytes" needs no files.'
    )
    digest: Annotated[str, matching(r"([0-9a-f]{64})?", "empty or 64 hexadecimal digits")] = Field(
        default="",
        description="Hash of its behaviour. Filled in by the peer that starts the run.",
    )


class DataSpec(Section):
    """Which text is trained on."""

    source: str = Field(
        default="stdlib",
        min_length=1,
        description='"stdlib" (the sources of Python\'s standard library), a file, a folder, or "hf:NAME[:CONFIG]".',
    )
    format: Literal["auto", "text", "jsonl", "parquet"] = Field(
        default="auto", description="How files are read. auto goes by the ending of their names."
    )
    field: str = Field(default="text", min_length=1, description="Column or key that holds the text.")
    split: str = Field(default="train", min_length=1, description="Which split of a hub dataset.")
    holdout: float = Field(
        default=0.02, gt=0, le=0.5, description="Share of the text kept from training, for evaluation and the probe."
    )
    streaming: bool = Field(
        default=False, description="Read a hub dataset while training instead of fetching it first."
    )

    @model_validator(mode="after")
    def _check(self) -> DataSpec:
        if self.streaming and not self.source.startswith("hf:"):
            raise ValueError(f'streaming must be false unless source is "hf:...", got true with {self.source!r}')
        return self


class RoundSpec(Section):
    """The rhythm of the run."""

    steps: int = Field(
        default=50, ge=1, le=10**6, description="Inner steps between two exchanges. More: less traffic, more drift."
    )
    count: int = Field(
        default=100, ge=1, le=10**9, description="Rounds in the run. Sets the length of the schedule too."
    )


class InnerSpec(Section):
    """The optimizer of a peer's own steps: AdamW, warm-up, cosine."""

    lr: float = Field(default=1e-3, gt=0, le=10, description="Highest learning rate.")
    warmup_steps: int = Field(default=20, ge=0, le=10**9, description="Steps over which the learning rate rises to it.")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="What is left of it at the end of the run.")
    weight_decay: float = Field(default=0.1, ge=0, le=10, description="Decoupled decay of weight matrices.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Memory of the gradient's mean.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Memory of the gradient's square.")
    clip: float = Field(default=1.0, gt=0, description="Longest gradient; a longer one is scaled down to it.")
    batch: int = Field(default=8, ge=1, le=1 << 20, description="Sequences a step.")


class OuterSpec(Section):
    """The optimizer across peers: Nesterov on the mean movement of a round."""

    lr: float = Field(
        default=0.7, gt=0, le=10, description="How far the shared point follows the mean movement (gamma)."
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="How much of earlier movements it keeps (mu).")


class Mix1Spec(Section):
    """Mixing of the parameters, in the background."""

    strategy: Strategy = Field(
        default="global",
        description="Who averages with whom: none, pair (one random partner), global (everybody). "
        "The preset's, unless set here.",
    )
    codec: CodecName = Field(
        default="int8", description="How values are coded; pair takes bf16 or fp32 only. The preset's, unless set here."
    )


class Mix2Spec(Section):
    """Mixing of the movement, blocking, up to its deadline."""

    strategy: Strategy = Field(
        default="pair",
        description="Who averages with whom: none, pair (one random partner), global (everybody). "
        "The preset's, unless set here.",
    )
    codec: CodecName = Field(
        default="int4", description="How values are coded; all of them keep the mean. The preset's, unless set here."
    )
    deadline: Deadline = Field(
        default="auto",
        description='Longest wait. Past it the round goes on with what arrived. "auto": from bytes and rate.',
    )


class MixingSpec(Section):
    """How peers are made one model. The preset fills in what is not set."""

    preset: Preset = Field(default="global-m1-local-m2", description="Named pair of strategies and codecs.")
    chunk: Bytes = Field(
        default=1 << 20,
        ge=1 << 12,
        le=3 << 20,
        description="What is coded, sent, checked and mixed at once, on the wire.",
    )
    mix1: Mix1Spec = Field(default_factory=Mix1Spec)
    mix2: Mix2Spec = Field(default_factory=Mix2Spec)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        preset = PRESETS.get(str(data.get("preset", "global-m1-local-m2")), {})
        filled = dict(data)
        for stage, values in preset.items():
            own = data.get(stage, {})
            filled[stage] = {**values, **own} if isinstance(own, dict) else own
        return filled

    @model_validator(mode="after")
    def _check(self) -> MixingSpec:
        if self.mix1.strategy == "pair" and self.mix1.codec not in ("bf16", "fp32"):
            raise ValueError(
                f"mix1.codec must be bf16 or fp32 with mix1.strategy pair, got {self.mix1.codec!r}: a pair shares no "
                "reference to code the difference to, and whole parameters below 16 bit lose more than a round gains"
            )
        return self


class ProbeSpec(Section):
    """Tokens on which peers compare their predictions."""

    tokens: int = Field(default=256, ge=1, le=1 << 16, description="How many. More: a steadier figure, more to send.")
    top_k: int = Field(
        default=64, ge=1, le=4096, description="Most likely tokens sent for each; the rest goes as one sum."
    )
    ids: Annotated[str, matching(r"[A-Za-z0-9+/]*={0,2}", "empty or base64 text")] = Field(
        default="",
        max_length=1 << 19,
        description="The tokens themselves, base64. Filled in by the peer that starts the run.",
    )


class RunSpec(Section):
    """What all peers agree on. Immutable; `fingerprint` names it."""

    name: Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "1 to 64 letters, digits, dots or dashes")] = (
        Field(default="peer", description="Name of the run.")
    )
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Where all randomness of the run starts.")
    model: ModelSpec = Field(default_factory=ModelSpec)
    tokenizer: TokenizerSpec = Field(default_factory=TokenizerSpec)
    data: DataSpec = Field(default_factory=DataSpec)
    round: RoundSpec = Field(default_factory=RoundSpec)
    inner: InnerSpec = Field(default_factory=InnerSpec)
    outer: OuterSpec = Field(default_factory=OuterSpec)
    mixing: MixingSpec = Field(default_factory=MixingSpec)
    probe: ProbeSpec = Field(default_factory=ProbeSpec)

    def canonical(self) -> str:
        """Return the one JSON text of this spec: sorted keys, no spaces, ASCII."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical text, hex."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    @property
    def key(self) -> bytes:
        """The run's id on the wire: the first 16 bytes of the fingerprint."""
        return bytes.fromhex(self.fingerprint)[:16]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunSpec:
        """Return the spec with these nested values, defaults for the rest. Raises ConfigError."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise config_error(cls, error) from None

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        """Read a spec that came over the network or from a checkpoint. Raises ConfigError."""
        if len(text) > MAX_SPEC_BYTES:
            raise ConfigError("run spec", f"must be under {MAX_SPEC_BYTES} bytes, got {len(text)}")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError("run spec", f"must be JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError("run spec", f"must be a JSON object, got {type(values).__name__}")
        return cls.of(values)

    def replaced(self, **fields: Any) -> RunSpec:
        """Return a copy with some fields changed, dots written as __: `probe__ids="..."`. Raises ConfigError."""
        values = self.model_dump()
        for name, value in fields.items():
            *sections, leaf = name.split("__")
            place = values
            for section in sections:
                place = place[section]
            place[leaf] = value
        return self.of(values)

    def fields(self) -> dict[str, str]:
        """Return dotted name -> canonical JSON of every field, the model's configuration key by key."""
        flat = flatten(self.model_dump(mode="json"), OPEN_KEYS)
        return {dotted: canonical_json(value) for dotted, value in flat.items()}


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the fields of `ours` that `theirs` has otherwise or lacks: name -> (ours, theirs)."""
    return {
        name: (value, theirs.get(name, "not set"))
        for name, value in ours.items()
        if theirs.get(name, "not set") != value
    }


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
