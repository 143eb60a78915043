"""Build the model and its tokenizer from a run spec: any causal language model that transformers knows.

Every peer of a run builds the same model: random weights come from the spec's seed, on the CPU, whatever device trains.
The one thing you would get wrong: a tied weight has two names and one storage. It is one entry of the layout, trained,
sent and mixed once; frozen parameters and buffers are none at all.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from peer import codec
from peer.config import ModelSpec, RunSpec, TokenizerSpec
from peer.errors import ConfigError, DataError
from peer.layout import Layout, chunk_elements

Tokens = NDArray[np.uint32]
Shape = tuple[str, tuple[int, ...]]  # a parameter: its name and dimensions


class Tokenizer(Protocol):
    """Text to token ids. `end` closes a document, None where the vocabulary has no such token."""

    digest: str
    vocab_size: int
    begin: int | None
    end: int | None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text, with no special tokens around them."""

    def save(self, folder: Path) -> None:
        """Write it as transformers reads it."""


class ByteTokenizer:
    """The ids of ByT5: a UTF-8 byte plus three. Needs no files, and no transformers until it is saved."""

    vocab_size = 384
    begin: int | None = None
    end: int | None = 1
    digest = hashlib.sha256(b"utf-8 bytes, id = byte + 3, end = 1, 384 ids").hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        # surrogatepass: JSON may escape half of a pair, which is no reason to lose the document.
        raw = (text.encode("utf-8", "surrogatepass") for text in texts)
        return [np.frombuffer(octets, np.uint8).astype(np.uint32) + 3 for octets in raw]

    def save(self, folder: Path) -> None:
        _transformers().ByT5Tokenizer().save_pretrained(str(folder))


class PretrainedTokenizer:
    """A tokenizer that transformers loads from a folder or the hub."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        self.begin: int | None = tokenizer.bos_token_id
        self.end: int | None = tokenizer.eos_token_id
        # The vocabulary alone does not say how text is split: a sample encoded tells rules apart, too.
        sample = "def f(x):\n\treturn  x + 1  # naïve 日本語 😀\r\n\n'A b.C' 12345"
        behaviour = [self.begin, self.end, sorted(tokenizer.get_vocab().items()), self.encode([sample])[0].tolist()]
        self.digest = hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        ids = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.asarray(row, np.uint32) for row in ids["input_ids"]]

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Return the run's tokenizer. Raises DataError when there is none, or it is not the one the run started with."""
    tokenizer: Tokenizer
    if spec.path == "bytes":
        tokenizer = ByteTokenizer()
    else:
        with _named(f"tokenizer {spec.path}"):
            tokenizer = PretrainedTokenizer(
                _transformers().AutoTokenizer.from_pretrained(spec.path, **_source(spec.path))
            )
    if spec.digest and spec.digest != tokenizer.digest:
        raise DataError(
            f"tokenizer {spec.path} is not the one this run started with: "
            f"its digest is {tokenizer.digest[:16]}, the run's {spec.digest[:16]}"
        )
    return tokenizer


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model, its tokenizer and its place in the flat vector. `parameters[i]` is `layout.entries[i]`."""

    module: nn.Module
    tokenizer: Tokenizer
    context: int
    layout: Layout
    parameters: tuple[nn.Parameter, ...]

    @property
    def vocab_size(self) -> int:
        """Width of the logits; at least the tokenizer's."""
        return _vocab_size(self.module.config)

    def save_pretrained(self, folder: Path, weights: Tensor | None = None) -> None:
        """Write a folder that transformers loads, with tokenizer. `weights` (n_params,) fp32 replace the parameters."""
        if weights is not None:
            self.layout.write(self.parameters, 0, self.layout.n_params, weights)
        _transformers()
        save: Any = self.module.save_pretrained
        save(str(folder))
        self.tokenizer.save(folder)


def build(spec: RunSpec, tokenizer: Tokenizer | None = None) -> LanguageModel:
    """Return the spec's model on the CPU in fp32, in training mode. Raises DataError, ConfigError."""
    tokenizer = tokenizer or load_tokenizer(spec.tokenizer)
    config = _configuration(spec.model, tokenizer)
    auto = _transformers().AutoModelForCausalLM
    with _named(_name(spec.model)), torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        if spec.model.pretrained:
            module = _load_weights(auto, spec.model.path, config)
        else:
            module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        module.eval()
        with torch.no_grad():  # sizes that do not fit each other show only when the model runs
            module(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    layout = layout_of(spec, [(name, tuple(parameter.shape)) for name, parameter in named.items()])
    module.train()
    return LanguageModel(
        module, tokenizer, spec.model.context, layout, tuple(named[entry.name] for entry in layout.entries)
    )


def shapes(spec: RunSpec, tokenizer: Tokenizer | None = None) -> list[Shape]:
    """Return the name and shape of every trained parameter, allocating none. Raises DataError, ConfigError."""
    config = _configuration(spec.model, tokenizer or load_tokenizer(spec.tokenizer))
    auto = _transformers().AutoModelForCausalLM
    with _named(_name(spec.model)), torch.device("meta"):
        module = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return [(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]


def layout_of(spec: RunSpec, named_shapes: Sequence[Shape]) -> Layout:
    """Return the flat layout of these parameters, in chunks of the spec's size on the wire."""
    size = sum(int(np.prod(shape, dtype=np.int64)) for _, shape in named_shapes)
    if not size:
        raise DataError(f"{_name(spec.model)} has no parameters to train")
    stages = (spec.mixing.mix1, spec.mixing.mix2)
    # Chunks are the same in both exchanges. The widest codec decides, and 16 bit at least: that is what a chunk without
    # a shared reference goes as, and what is held of it meanwhile (sums, copies, catch-up) is fp32.
    bits = max((codec.by_name(stage.codec).bits for stage in stages if stage.strategy != "none"), default=32.0)
    bits = max(bits, 16.0)
    return Layout.of_shapes(named_shapes, chunk_elements(size, bits / 8, spec.mixing.chunk))


def _configuration(spec: ModelSpec, tokenizer: Tokenizer) -> Any:
    transformers = _transformers()
    with _named(_name(spec)):
        if spec.path:
            config, unknown = transformers.AutoConfig.from_pretrained(
                spec.path, return_unused_kwargs=True, **_source(spec.path), **spec.config
            )
            if unknown:
                raise _unknown_field(next(iter(unknown)), config)
        else:
            config = _new_configuration(transformers, spec, tokenizer)
    config.use_cache = False
    if _vocab_size(config) < tokenizer.vocab_size:
        raise DataError(
            f"{_name(spec)} has a vocabulary of {_vocab_size(config)}, its tokenizer one of {tokenizer.vocab_size}"
        )
    table = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(table, int) and table < spec.context:
        raise ConfigError("model.context", f"must be <= {table}, the positions {_name(spec)} has; got {spec.context}")
    return config


def _new_configuration(transformers: Any, spec: ModelSpec, tokenizer: Tokenizer) -> Any:
    mapping = transformers.CONFIG_MAPPING
    if spec.type not in mapping:
        raise ConfigError(
            "model.type", f"must be a transformers model type, got {spec.type!r}{_nearest(spec.type, mapping)}"
        )
    plain = mapping[spec.type]()
    for field in spec.config:
        if field not in _fields(plain):
            raise _unknown_field(field, plain)
    # Special tokens are the tokenizer's: the type's own ids mean something in its first vocabulary only. No padding
    # token: an embedding row named as padding would never be trained.
    values = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.begin,
        "eos_token_id": tokenizer.end,
        "pad_token_id": None,
    }
    if "max_position_embeddings" in _fields(plain) and "n_positions" not in spec.config:
        values["max_position_embeddings"] = spec.context
    return transformers.AutoConfig.for_model(spec.type, **{**values, **spec.config})


def _load_weights(auto: Any, path: str, config: Any) -> Any:
    module, info = auto.from_pretrained(
        path, config=config, dtype=torch.float32, output_loading_info=True, **_source(path)
    )
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise DataError(f"model {path} lacks weights for {', '.join(names[:3])} ({len(names)} in all)")
    return module


def _source(path: str) -> dict[str, Any]:
    """How to read a folder (no network call at all) or a hub name. Never runs code that comes with it."""
    local = Path(path).expanduser().is_dir()
    if not local and (path.startswith(("/", ".", "~")) or Path(path).exists()):
        raise DataError(f"{path} is no folder")
    return {"local_files_only": local, "trust_remote_code": False}


def _vocab_size(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def _name(spec: ModelSpec) -> str:
    return f"model {spec.path or spec.type}"


def _fields(config: Any) -> set[str]:
    return {*config.to_dict(), *config.attribute_map}


def _unknown_field(field: str, config: Any) -> ConfigError:
    return ConfigError(
        f"model.config.{field}", f"is no field of a {config.model_type} model{_nearest(field, _fields(config))}"
    )


def _nearest(word: str, among: Any) -> str:
    close = difflib.get_close_matches(word, list(among), n=1)
    return f"; the nearest is {close[0]!r}" if close else ""


@contextmanager
def _named(thing: str) -> Iterator[None]:
    """Turn whatever transformers raises about what it was given into a DataError that names it."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    problems = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError)
    try:
        yield
    except (*problems, StrictDataclassError, SafetensorError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise DataError(f"{thing} cannot be used: {' '.join(lines[:2]) or type(error).__name__}") from error


def _transformers() -> Any:
    """Import transformers when it is needed: it costs seconds."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers
