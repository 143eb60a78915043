"""The model and its tokenizer: same weights everywhere, tied weights once, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peer.config import RunSpec, TokenizerSpec
from peer.errors import ConfigError, DataError
from peer.model import ByteTokenizer, LanguageModel, build, layout_of, load_tokenizer, shapes

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY_LLAMA = {**TINY, "num_key_value_heads": 2}
TINY_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2}


def tiny(**model: Any) -> RunSpec:
    return RunSpec.of({"model": {"context": 16, "config": TINY_LLAMA, **model}})


def flat(model: LanguageModel) -> torch.Tensor:
    out = torch.empty(model.layout.n_params)
    model.layout.read(model.parameters, 0, model.layout.n_params, out)
    return out


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again = build(tiny()), build(tiny())
    other = build(RunSpec.of({"seed": 1, "model": {"context": 16, "config": TINY_LLAMA}}))
    assert torch.equal(flat(first), flat(again))
    assert not torch.equal(flat(first), flat(other))


def test_building_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build(tiny())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_module_is_fp32_on_the_cpu_and_trains():
    model = build(tiny())
    assert model.module.training
    assert {p.dtype for p in model.parameters} == {torch.float32}
    assert {p.device.type for p in model.parameters} == {"cpu"}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("gpt2", TINY_GPT2),
        ("gpt_neox", TINY),
        ("qwen2", TINY_LLAMA),
        ("opt", {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
    ],
)
def test_other_causal_models_build_and_run(kind, config):
    model = build(tiny(type=kind, config=config))
    logits = model.module(input_ids=torch.zeros(1, 16, dtype=torch.long)).logits
    assert logits.shape == (1, 16, model.vocab_size)
    assert model.layout.n_params == sum(p.numel() for p in model.module.parameters())


def test_a_tied_weight_is_one_entry_and_stays_one_storage_when_written():
    model = build(tiny(type="gpt2", config=TINY_GPT2))
    names = [entry.name for entry in model.layout.entries]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    model.layout.write(model.parameters, 0, model.layout.n_params, torch.ones(model.layout.n_params))
    module: Any = model.module
    assert module.lm_head.weight.data_ptr() == module.transformer.wte.weight.data_ptr()
    assert bool((module.lm_head.weight == 1).all())


def test_parameters_are_in_the_order_of_the_layout():
    model = build(tiny())
    named = dict(model.module.named_parameters())
    for entry, parameter in zip(model.layout.entries, model.parameters, strict=True):
        assert named[entry.name] is parameter
        assert entry.shape == tuple(parameter.shape)


def test_frozen_parameters_and_buffers_are_not_in_the_layout(monkeypatch):
    def freeze(module: torch.nn.Module) -> torch.nn.Module:
        next(module.parameters()).requires_grad_(False)
        module.register_buffer("running", torch.zeros(3))
        return module

    plain = transformers.AutoModelForCausalLM.from_config
    everything = len(build(tiny()).layout.entries)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_config", lambda *args, **kwargs: freeze(plain(*args, **kwargs))
    )
    names = [entry.name for entry in build(tiny()).layout.entries]
    assert len(names) == everything - 1
    assert "running" not in names


def test_shapes_on_the_meta_device_give_the_layout_of_the_built_model():
    for spec in (tiny(), tiny(type="gpt2", config=TINY_GPT2)):
        assert layout_of(spec, shapes(spec)).digest == build(spec).layout.digest


def test_byte_tokens_are_those_of_byt5():
    reference = transformers.ByT5Tokenizer()
    texts = ["def f():\n\treturn 'é日本😀'\r\n", "", "a"]
    ours = [tokens.tolist() for tokens in ByteTokenizer().encode(texts)]
    assert ours == reference(texts, add_special_tokens=False)["input_ids"]
    assert ByteTokenizer.end == reference.eos_token_id
    assert ByteTokenizer.vocab_size == len(reference)


def test_text_that_looks_like_a_special_token_is_only_text():
    assert len(ByteTokenizer().encode(["</s>"])[0]) == 4


def test_half_a_surrogate_pair_is_encoded():
    assert len(ByteTokenizer().encode(["\ud800"])[0]) == 3


def test_a_run_refuses_another_tokenizer():
    with pytest.raises(DataError, match="not the one this run started with"):
        load_tokenizer(TokenizerSpec(digest="0" * 64))
    assert load_tokenizer(TokenizerSpec(digest=ByteTokenizer.digest)).vocab_size == 384


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "def": 1, "return": 2, "x": 3, "[END]": 4}
    special = {"unk_token": "[UNK]", "eos_token": "[END]"}
    tokenizer = Tokenizer(models.WordLevel(words, special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "words"
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def test_a_tokenizer_is_read_from_a_folder(word_tokenizer):
    tokenizer = load_tokenizer(TokenizerSpec(path=str(word_tokenizer)))
    assert (tokenizer.vocab_size, tokenizer.end) == (5, 4)
    assert [tokens.tolist() for tokens in tokenizer.encode(["def x", "return other"])] == [[1, 3], [2, 0]]


def test_tokenizers_of_one_size_but_other_words_have_other_digests(word_tokenizer, tmp_path):
    first = load_tokenizer(TokenizerSpec(path=str(word_tokenizer)))
    file = word_tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {"[UNK]": 0, "def": 1, "return": 2, "y": 3, "[END]": 4}
    file.write_text(json.dumps(content))
    second = load_tokenizer(TokenizerSpec(path=str(word_tokenizer)))
    assert first.vocab_size == second.vocab_size
    assert first.digest != second.digest


def test_what_was_saved_loads_with_transformers_and_holds_the_weights(tmp_path):
    model = build(tiny())
    weights = torch.randn(model.layout.n_params, generator=torch.Generator().manual_seed(3)) * 0.1
    model.save_pretrained(tmp_path, weights)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    ids = torch.arange(16)[None]
    with torch.no_grad():
        expected = model.module.eval()(input_ids=ids).logits
        assert torch.equal(loaded(input_ids=ids).logits, expected)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)("a").input_ids == [100, 1]


def test_a_saved_folder_is_a_model_path_with_or_without_its_weights(tmp_path):
    model = build(tiny())
    weights = torch.full((model.layout.n_params,), 0.25)
    model.save_pretrained(tmp_path, weights)
    assert torch.equal(flat(build(tiny(path=str(tmp_path), config={}, pretrained=True))), weights)
    assert not torch.equal(flat(build(tiny(path=str(tmp_path), config={}))), weights)


def test_weights_missing_from_a_folder_are_named(tmp_path):
    build(tiny()).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"lacks weights for model\.layers\.2"):
        build(tiny(path=str(tmp_path), pretrained=True, config={"num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"type": "lama"}, ConfigError, r"model\.type .*'lama'.*nearest is 'llama'"),
        ({"config": {"hiden_size": 8}}, ConfigError, r"model\.config\.hiden_size.*nearest is 'hidden_size'"),
        ({"config": {**TINY_LLAMA, "hidden_size": 15}}, DataError, "model llama cannot be used.*15"),
        ({"config": {**TINY_LLAMA, "vocab_size": 100}}, DataError, "vocabulary of 100, its tokenizer one of 384"),
        ({"type": "vit", "config": {}}, DataError, "model vit cannot be used"),
        ({"path": "/no/such/folder", "config": {}}, DataError, "/no/such/folder is no folder"),
    ],
)
def test_a_model_that_cannot_be_built_is_named_with_what_is_wrong(model, error, message):
    with pytest.raises(error, match=message):
        build(tiny(**model))


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(DataError, match=f"model {tmp_path} cannot be used"):
        build(tiny(path=str(tmp_path), config={}))
    (tmp_path / "config.json").write_text("{bad")
    with pytest.raises(DataError, match="not a valid JSON"):
        build(tiny(path=str(tmp_path), config={}))


def test_a_context_longer_than_the_position_table_is_refused(tmp_path):
    build(tiny(type="gpt2", config=TINY_GPT2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.context must be <= 16"):
        build(tiny(path=str(tmp_path), config={}, context=17))


def test_an_unreadable_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=f"tokenizer {tmp_path} cannot be used"):
        load_tokenizer(TokenizerSpec(path=str(tmp_path)))


def test_code_that_comes_with_a_folder_is_not_run(tmp_path):
    build(tiny()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError):
        build(tiny(path=str(tmp_path), config={}))
    assert not (tmp_path / "ran").exists()


def test_a_configuration_whose_sizes_do_not_fit_is_named_before_the_first_step():
    config = {"num_attention_heads": 2, "num_key_value_heads": 4}
    with pytest.raises(DataError, match="model llama cannot be used"):
        build(RunSpec.of({"model": {"config": config}}))
