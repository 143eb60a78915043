"""Configuration: what is refused, in which words, what wins, and what two peers compare."""

from __future__ import annotations

import json
import os
import re

import pytest

from peer.config import (
    PRESETS,
    Config,
    Everything,
    MixingSpec,
    RoundSpec,
    RunSpec,
    canonical_json,
    differing,
    environment,
    load,
    spec_fields_set,
    template,
)
from peer.config.sections import walk
from peer.errors import ConfigError, UsageError


def of(*overrides: str, file=None, env=None, flags=None) -> Config:
    return load(file, env={} if env is None else env, overrides=overrides, flags=flags)


@pytest.fixture
def toml(tmp_path):
    def write(text: str):
        path = tmp_path / "peer.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# ---- what is refused, and how


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("round.steps=0", "round.steps must be >= 1, got 0"),
        ("round.steps=-1", "round.steps must be >= 1, got -1"),
        ("round.steps=1.5", "round.steps must be a whole number, got 1.5"),
        ("round.steps=true", "round.steps must be a whole number, got true"),
        ("round.steps='1'", "round.steps must be a whole number, got '1'"),
        ("round.steps=", "round.steps must be a whole number, got ''"),
        ("round.steps=nan", "round.steps must be a whole number, got nan"),
        ("inner.lr=nan", "inner.lr must be a finite number, got nan"),
        ("inner.lr=inf", "inner.lr must be a finite number, got inf"),
        ("inner.lr=true", "inner.lr must be a number, got true"),
        ("inner.lr=0", "inner.lr must be > 0, got 0"),
        ("outer.momentum=1", "outer.momentum must be < 1, got 1"),
        ("inner.min_lr_ratio=1.5", "inner.min_lr_ratio must be <= 1, got 1.5"),
        ("data.holdout=0", "data.holdout must be > 0, got 0"),
        ("resume=1", "resume must be true or false, got 1"),
        ("network.bootstrap=[1]", "network.bootstrap must be text, got 1"),
        ("seed=9223372036854775808", "seed must be < 9223372036854775808"),
        ("name=a b", "name must be 1 to 64 letters, digits, dots or dashes, got 'a b'"),
        ("tokenizer.digest=x", "tokenizer.digest must be empty or 64 hexadecimal digits, got 'x'"),
        ("device.name=gpu", "device.name must be auto, cpu, mps, cuda or cuda:N, got 'gpu'"),
        ("data.format=json", "data.format must be one of auto, text, jsonl, parquet, got 'json'; did you mean jsonl?"),
        ("mixing.preset=dilocco", "did you mean diloco?"),
        ("mixing.chunk=4MiB", "mixing.chunk must be <= 3MiB, got 4MiB"),
        ("mixing.chunk=1.0", "mixing.chunk must be a whole number, got 1.0"),
        ("mixing.chunk=1e999MiB", "mixing.chunk must be a size such as"),
        ("mixing.mix2.deadline=0s", 'mixing.mix2.deadline must be "auto" or > 0s, got 0'),
        ("mixing.mix2.deadline=soon", "mixing.mix2.deadline must be a duration such as"),
        ("mixing.mix2.deadline=true", "mixing.mix2.deadline must be a number, got true"),
        ("network.upload=100MB", "network.upload must be a rate in bits such as"),
        ("network.upload=100MBps", "network.upload must be a rate in bits such as"),
        ("network.join_timeout=-1s", "network.join_timeout must be a duration such as"),
        ("network.join_timeout=-1", "network.join_timeout must be > 0s, got -1s"),
        ("network.listen=h", "network.listen must be host:port: 'h' is not an address: the port is missing"),
        ("network.bootstrap=0.0.0.0:7700", "network.bootstrap must be an address that others can dial"),
        ("network.bootstrap=10.0.0.1:0", "the port must be a number from 1 to 65535"),
        ("network.bootstrap=['']", "network.bootstrap must hold addresses, got ''"),
        ("admin.listen=0.0.0.0:1", "admin.listen must be a loopback address, got '0.0.0.0:1'"),
        ("device.micro_batch=3", "device.micro_batch must divide inner.batch (8), got 3"),
        ("data.streaming=true", "data.streaming must be false unless source is"),
        ("model.pretrained=true", "model.pretrained must be false unless path names a model, got true"),
        ("model.config=5", "model.config must be a table of keys and values, got 5"),
        ("round=5", "round is a section; its keys are steps, count"),
    ],
)
def test_a_wrong_value_is_refused_with_the_rule_and_the_value(override, message):
    with pytest.raises(ConfigError) as error:
        of(override)
    assert message in str(error.value)
    assert error.value.field == override.partition("=")[0]
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("round.step=5", "round.steps"),
        ("rounds.steps=5", "round.steps"),
        ("rounds.step=5", "round.steps"),
        ("network.boot=a:1", "network.bootstrap"),
        ("inner.steps=5", "round.steps"),
        ("steps=5", "round.steps"),
        ("round.inner_lr=5", None),
        ("network.join-timeout=5s", "network.join_timeout"),
        ("NETWORK.LISTEN=a:1", "network.listen"),
        ("bootstrap=a:1", "network.bootstrap"),
        ("mixing.mix1.codecs=int8", "mixing.mix1.codec"),
        ("mix2.deadline=5s", "mixing.mix2.deadline"),
        ("mixing.deadline=5s", "mixing.mix2.deadline"),
        ("outer.momentun=0.9", "outer.momentum"),
        ("inner.momentum=0.9", "outer.momentum"),
        ("model.contxt=64", "model.context"),
        ("checkpoints.keep=1", "checkpoint.keep"),
        ("nonsense.nothing=1", None),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(override, nearest):
    with pytest.raises(ConfigError) as error:
        of(override)
    problem = str(error.value)
    assert problem.startswith(f"{override.partition('=')[0]} is not a setting")
    if nearest:
        assert f"did you mean {nearest}?" in problem
    else:
        assert "did you mean" not in problem
        assert "the keys of [round] are steps, count" in problem or "the sections are model, tokenizer" in problem


def test_all_faults_are_told_at_once_each_with_its_origin(toml):
    path = toml("[round]\nsteps = 0\n")
    with pytest.raises(ConfigError) as error:
        of("inner.batch=0", file=path, env={"PEER_OUTER__LR": "-1"})
    assert sorted(str(error.value).splitlines()) == [
        "inner.batch must be >= 1, got 0 (flag)",
        "outer.lr must be > 0, got -1 (env PEER_OUTER__LR)",
        f"round.steps must be >= 1, got 0 (file {path})",
    ]


def test_every_unknown_key_is_told_at_once(toml):
    with pytest.raises(ConfigError) as error:
        of(file=toml("stepz = 1\n[rond]\nsteps = 2\n[network.listen]\nx = 1\n"))
    told = str(error.value)
    assert "stepz is not a setting" in told
    assert "rond.steps is not a setting; did you mean round.steps?" in told


def test_a_section_that_is_no_table_is_refused(toml):
    with pytest.raises(ConfigError, match=r"mixing\.mix1 must be a section, got 'pair'"):
        of(file=toml('[mixing]\nmix1 = "pair"\n'))


def test_mix1_between_pairs_needs_sixteen_bits_and_the_error_says_why():
    with pytest.raises(ConfigError, match=r"mixing\.mix1\.codec must be bf16 or fp32.*'int8'.* shares no reference"):
        of("mixing.mix1.strategy=pair")
    assert of("mixing.mix1.strategy=pair", "mixing.mix1.codec=fp32").spec.mixing.mix1.codec == "fp32"


def test_listening_off_loopback_needs_insecure_and_the_error_names_the_flag():
    with pytest.raises(ConfigError, match=r"network\.listen .*--insecure.*'0\.0\.0\.0:7700'"):
        of("network.listen=0.0.0.0:7700")
    open_ = of("network.listen=0.0.0.0:7700", flags={"network.insecure": True})
    assert open_.settings.network.listen == "0.0.0.0:7700"
    for loopback in ("127.0.0.1:0", "localhost:7700", "[::1]:7700", "127.8.8.8:1"):
        assert of(f"network.listen={loopback}").settings.network.listen == loopback


def test_a_context_longer_than_the_position_table_is_refused():
    with pytest.raises(ConfigError, match=r"model\.context must be <= config\.max_position_embeddings \(32\), got 64"):
        of("model.config.max_position_embeddings=32")


@pytest.mark.parametrize(
    "key", ["auto_map", "trust_remote_code", "attn_implementation", "quantization_config", "use_kernels"]
)
def test_a_spec_cannot_make_a_library_load_code(key):
    nested = {"model": {"config": {"text_config": {key: "x"}}}}
    with pytest.raises(ConfigError, match=rf"model\.config must not set {key}"):
        RunSpec.of(nested)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_attn_implementation": "x"}, "must have keys of letters, digits and underscores"),
        ({"a": float("nan")}, "must hold finite numbers"),
        ({"a": object()}, "must hold plain JSON values"),
        ({"a": [[[[[[[[[1]]]]]]]]]}, "must not be nested deeper"),
    ],
)
def test_the_models_configuration_is_plain_and_bounded(config, message):
    with pytest.raises(ConfigError, match=message):
        RunSpec.of({"model": {"config": config}})


@pytest.mark.parametrize("item", ["round.steps", "=5", ""])
def test_a_set_without_name_or_value_is_refused(item):
    with pytest.raises(ConfigError, match=r"--set must be section\.key=value"):
        of(item)


# ---- files


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read the configuration file .*gone\.toml: No such file"):
        of(file=tmp_path / "gone.toml")


def test_a_folder_given_as_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot read the configuration file"):
        of(file=tmp_path)


def test_a_syntax_error_names_file_and_line(toml):
    with pytest.raises(UsageError, match=r"peer\.toml is not TOML: .*line 2"):
        of(file=toml("seed = 1\nround = \n"))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        of(file=tmp_path / "x.toml")


def test_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbfseed = 7\n")
    assert of(file=tmp_path / "x.toml").spec.seed == 7


# ---- what wins


def test_file_then_environment_then_flags_and_each_origin_is_known(toml):
    path = toml('seed = 1\nname = "a"\n[round]\nsteps = 10\ncount = 5\n[network]\nupload = "20mbit"\n')
    config = of("round.steps=30", file=path, env={"PEER_ROUND__STEPS": "20", "PEER_SEED": "2"})
    assert (config.spec.name, config.spec.seed, config.spec.round.steps, config.spec.round.count) == ("a", 2, 30, 5)
    assert config.origins["name"] == f"file {path}"
    assert config.origins["seed"] == "env PEER_SEED"
    assert config.origins["round.steps"] == "flag"
    assert config.origins["inner.lr"] == "default"
    assert config.settings.network.upload == 20_000_000


def test_named_flags_beat_set_and_those_not_given_count_for_nothing():
    config = of("network.listen=127.0.0.1:1", flags={"network.listen": "127.0.0.1:2", "storage.dir": None})
    assert config.settings.network.listen == "127.0.0.1:2"
    assert config.origins["storage.dir"] == "default"
    assert of(flags={"network.bootstrap": ("a:1", "b:2")}).settings.network.bootstrap == ["a:1", "b:2"]
    assert of("network.bootstrap=a:1", flags={"network.bootstrap": ()}).settings.network.bootstrap == ["a:1"]


def test_environment_variables_may_have_single_underscores_where_that_is_clear():
    config = of(env={"PEER_NETWORK_JOIN_TIMEOUT": "2m", "PEER_MIXING_MIX1_CODEC": "fp32", "PEER_RESUME": "false"})
    assert config.settings.network.join_timeout == 120
    assert config.spec.mixing.mix1.codec == "fp32"
    assert config.settings.resume is False
    assert config.origins["mixing.mix1.codec"] == "env PEER_MIXING_MIX1_CODEC"


def test_no_two_settings_share_a_variable():
    names = [key.dotted.replace(".", "_") for key in walk(Everything)]
    assert len(set(names)) == len(names)


def test_a_misspelt_environment_variable_is_refused_and_named():
    with pytest.raises(ConfigError, match=r"did you mean round\.steps\? \(env PEER_ROUND_STEP\)"):
        of(env={"PEER_ROUND_STEP": "20"})


def test_what_an_orchestrator_puts_into_the_environment_is_left_alone():
    service = {"PEER_SERVICE_HOST": "10.0.0.1", "PEER_PORT": "tcp://10.0.0.1:1", "PEER_PORT_7700_TCP_ADDR": "10.0.0.1"}
    assert of(env={**service, "PEERLESS": "1", "peer_seed": "1"}).spec == RunSpec()


def test_text_fields_keep_what_looks_like_another_type():
    assert of("name=7").spec.name == "7"
    assert of("model.path=true").spec.model.path == "true"
    assert of('data.source="a b"').spec.data.source == "a b"


def test_lists_are_written_with_commas_or_as_toml():
    assert of("network.bootstrap=a:1, [::1]:2").settings.network.bootstrap == ["a:1", "[::1]:2"]
    assert of('network.bootstrap=["a:1"]').settings.network.bootstrap == ["a:1"]
    assert of("network.bootstrap=").settings.network.bootstrap == []


def test_an_empty_rate_is_not_known_and_an_empty_address_is_off():
    config = of("network.upload=", "metrics.listen=")
    assert config.settings.network.upload is None
    assert config.settings.metrics.listen == ""


def test_the_process_environment_is_the_default(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PEER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PEER_SEED", "11")
    assert load().spec.seed == 11
    copy = environment()
    copy["PEER_SEED"] = "12"
    assert load().spec.seed == 11


# ---- presets


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_fills_in_what_is_not_set(preset):
    mixing = of(f"mixing.preset={preset}").spec.mixing
    assert mixing.mix1.model_dump() == PRESETS[preset]["mix1"]
    assert {key: getattr(mixing.mix2, key) for key in ("strategy", "codec")} == PRESETS[preset]["mix2"]


def test_what_is_set_beats_the_preset_and_the_rest_still_comes_from_it():
    config = of("mixing.preset=diloco", "mixing.mix2.codec=int4", "mixing.mix2.deadline=5s")
    assert config.spec.mixing.mix2.model_dump() == {"strategy": "global", "codec": "int4", "deadline": 5.0}
    assert config.origins["mixing.mix2.strategy"] == "preset diloco"
    assert config.origins["mixing.mix2.codec"] == "flag"


def test_the_same_mixing_spelt_in_code_and_by_preset_is_the_same():
    assert MixingSpec(preset="diloco") == of("mixing.preset=diloco").spec.mixing
    assert of().spec.mixing == MixingSpec()


# ---- the model's configuration


def test_single_model_fields_replace_those_of_the_small_llama():
    config = of("model.config.hidden_size=64")
    assert config.spec.model.config["hidden_size"] == 64
    assert config.spec.model.config["num_hidden_layers"] == 2
    assert config.origins["model.config.hidden_size"] == "flag"
    assert config.origins["model.config.num_hidden_layers"] == "default"
    assert of("model.config={hidden_size=64}").spec == config.spec
    assert of(env={"PEER_MODEL__CONFIG__HIDDEN_SIZE": "64"}).spec == config.spec


def test_another_type_or_a_folder_starts_from_its_own_defaults():
    assert of("model.type=gpt2", "model.config.n_layer=2").spec.model.config == {"n_layer": 2}
    assert of("model.path=some/folder").spec.model.config == {}


# ---- the spec as what peers agree on


def test_the_canonical_text_reads_back_as_the_same_run():
    spec = of("mixing.preset=local-m1-m2", "mixing.chunk=64KiB", "mixing.mix2.deadline=2m", "inner.lr=1e-3").spec
    again = RunSpec.from_json(spec.canonical())
    assert again == spec
    assert again.fingerprint == spec.fingerprint
    assert spec.key == bytes.fromhex(spec.fingerprint)[:16]


def test_numbers_spelt_differently_are_the_same_run():
    assert of("outer.momentum=0").spec.fingerprint == of("outer.momentum=0.0").spec.fingerprint
    assert of("mixing.chunk=1MiB").spec.fingerprint == of("mixing.chunk=1048576").spec.fingerprint


def test_every_single_field_changes_the_fingerprint():
    base = RunSpec()
    seen = {base.fingerprint}
    changes = {
        "seed": 1,
        "name": "x",
        "model.context": 32,
        "tokenizer.digest": "0" * 64,
        "data.field": "body",
        "round.steps": 7,
        "inner.beta2": 0.99,
        "outer.lr": 0.5,
        "mixing.chunk": 1 << 16,
        "probe.top_k": 32,
    }
    for dotted, value in changes.items():
        seen.add(base.replaced(**{dotted.replace(".", "__"): value}).fingerprint)
    assert len(seen) == len(changes) + 1


def test_a_replaced_field_is_checked_and_the_rest_stays():
    spec = of("round.steps=7").spec
    filled = spec.replaced(probe__ids="AAAA", tokenizer__digest="f" * 64)
    assert (filled.probe.ids, filled.tokenizer.digest, filled.round.steps) == ("AAAA", "f" * 64, 7)
    assert filled.fingerprint != spec.fingerprint
    with pytest.raises(ConfigError, match=r"probe\.ids must be empty or base64 text"):
        spec.replaced(probe__ids="!!")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        "[" * 100_000,
        '{"round": {"steps": "5"}}',
        '{"round": {"steps": NaN}}',
        '{"inner": {"lr": Infinity}}',
        '{"unknown": 1}',
        '{"mixing": {"mix1": []}}',
        '{"model": {"config": []}}',
        '{"model": []}',
        "{" + " " * (1 << 20) + "}",
    ],
)
def test_a_malformed_spec_from_the_network_is_a_config_error(text):
    with pytest.raises(ConfigError):
        RunSpec.from_json(text)


def test_only_what_was_set_on_purpose_is_compared_with_the_swarm():
    ours = of(
        "mixing.preset=diloco",
        "model.config.hidden_size=64",
        env={"PEER_ROUND__STEPS": "50", "PEER_LOG__LEVEL": "debug"},
    )
    fields = spec_fields_set(ours)
    assert fields == {"mixing.preset": '"diloco"', "model.config.hidden_size": "64", "round.steps": "50"}
    swarm = of("round.steps=20", "mixing.preset=diloco").spec.fields()
    assert differing(fields, swarm) == {"model.config.hidden_size": ("64", "128"), "round.steps": ("50", "20")}
    assert differing({"model.config.n_layer": "2"}, swarm) == {"model.config.n_layer": ("2", "not set")}


def test_a_peer_that_set_nothing_agrees_with_every_swarm():
    assert spec_fields_set(of("network.upload=1mbit")) == {}


def test_an_adopted_spec_is_checked_against_the_local_settings():
    config = of("device.micro_batch=4", "network.upload=1mbit", "round.steps=9")
    adopted = config.adopt(RunSpec(round=RoundSpec(steps=3)))
    assert adopted.spec.round.steps == 3
    assert adopted.origins["round.steps"] == "swarm"
    assert adopted.origins["network.upload"] == "flag"
    with pytest.raises(ConfigError, match=r"device\.micro_batch must divide inner\.batch \(6\), got 4"):
        config.adopt(RunSpec().replaced(inner__batch=6))


def test_canonical_json_has_one_spelling_and_no_nan():
    assert canonical_json({"b": 1, "a": ["é", 0.1]}) == '{"a":["\\u00e9",0.1],"b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunSpec().round.steps = 5  # type: ignore[misc]


# ---- what people see


def test_the_template_is_the_defaults_and_stays_so_with_every_line_taken_in(toml):
    assert of(file=toml(template())).for_json() == of().for_json()
    everything = re.sub(r"(?m)^# (?=[a-z0-9_]+ = )", "", template())
    config = of(file=toml(everything))
    assert config.for_json() == of().for_json()
    assert [name for name, origin in config.origins.items() if not origin.startswith("file")] == []


def test_every_field_says_what_it_is_for_and_never_its_default():
    for key in walk(Everything):
        text = key.info.description or ""
        assert text.endswith("."), key.dotted
        assert "default" not in text.lower(), key.dotted


def test_the_merged_result_is_plain_json_and_quantities_are_shown_with_units():
    config = of("network.upload=20mbit", "trainer.step_time=250ms")
    assert json.loads(json.dumps(config.for_json()))["network"]["upload"] == 20_000_000
    shown = config.shown()
    assert (shown["network.upload"], shown["trainer.step_time"], shown["mixing.chunk"]) == ("20mbit", "250ms", "1MiB")
    assert shown["mixing.mix2.deadline"] == "auto"
    assert set(shown) == set(config.origins)
