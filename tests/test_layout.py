"""Flat order, blocks and chunks, and copying between them and parameters of any stride."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.layout import Layout, block_of, chunk_elements

QUICK = settings(derandomize=True, max_examples=40, deadline=None)

SHAPES = [
    ("lm_head.weight", (50, 12)),
    ("model.layers.10.mlp.weight", (40, 12)),
    ("model.layers.2.mlp.weight", (40, 12)),
    ("model.layers.2.norm.weight", (12,)),
    ("model.norm.weight", (12,)),
    ("model.scale", ()),
    ("model.nothing", (0, 7)),
    ("model.embed_tokens.weight", (50, 12)),
    ("model.layers.10.conv.weight", (3, 4, 2, 5)),
]
N = 2305


def strided(shape: tuple[int, ...], kind: int) -> torch.Tensor:
    """Return a tensor of that shape whose memory is not in logical order, where the shape allows it."""
    if not shape:
        return torch.zeros(())
    if kind == 0:
        return torch.zeros(shape)
    if kind == 1:
        return torch.zeros(shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
    if kind == 2:
        return torch.zeros(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2][..., : shape[-1]]
    return torch.zeros(shape[0] * 2, *shape[1:])[::2]


def parameters(layout: Layout, kind: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    made = [strided(entry.shape, kind) for entry in layout.entries]
    for tensor in made:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return made


def flat(params: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in params])


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.embed_tokens.weight", "embedding"),  # llama
        ("model.layers.0.self_attn.q_proj.weight", "layer.0"),
        ("model.layers.11.input_layernorm.weight", "layer.11"),
        ("model.layers.3.mlp.experts.7.w1.weight", "layer.3"),
        ("model.norm.weight", "final_norm"),
        ("lm_head.weight", "head"),
        ("transformer.wte.weight", "embedding"),  # gpt2
        ("transformer.wpe.weight", "embedding"),
        ("transformer.h.5.ln_1.weight", "layer.5"),
        ("transformer.ln_f.bias", "final_norm"),
        ("gpt_neox.embed_in.weight", "embedding"),  # gpt-neox
        ("gpt_neox.layers.2.attention.dense.bias", "layer.2"),
        ("gpt_neox.final_layer_norm.weight", "final_norm"),
        ("embed_out.weight", "head"),
        ("model.decoder.embed_positions.weight", "embedding"),  # opt
        ("model.decoder.layers.1.fc1.weight", "layer.1"),
        ("model.decoder.final_layer_norm.weight", "final_norm"),
        ("model.decoder.project_in.weight", "other"),
        ("something.else", "other"),
    ],
)
def test_names_of_known_models_find_their_block(name, block):
    assert block_of(name) == block


def test_blocks_are_the_embedding_then_layers_by_number_then_the_rest_then_the_head():
    layout = Layout.of_shapes(SHAPES, 100)
    names = [block.name for block in layout.blocks]
    assert names == ["embedding", "layer.2", "layer.10", "other", "final_norm", "head"]
    assert [e.name for e in layout.entries if "layers.10" in e.name] == [n for n, _ in SHAPES if "layers.10" in n]


@given(st.integers(1, 700))
@QUICK
def test_chunks_cover_the_vector_once_and_never_span_two_blocks(size):
    layout = Layout.of_shapes(SHAPES, size)
    assert [chunk.index for chunk in layout.chunks] == list(range(len(layout.chunks)))
    at = 0
    for chunk in layout.chunks:
        block = layout.blocks[chunk.block]
        assert block.start <= chunk.start < chunk.stop <= block.stop
        assert 0 < chunk.size <= size
        assert chunk.start == at
        at = chunk.stop
    assert at == layout.n_params == sum(torch.Size(shape).numel() for _, shape in SHAPES)


@pytest.mark.parametrize(
    "kind", [0, 1, 2, 3], ids=["contiguous", "transposed", "every other column", "every other row"]
)
@given(window=st.tuples(st.integers(0, N), st.integers(0, N)))
@QUICK
def test_any_window_is_read_and_written_in_logical_order_whatever_the_strides(kind, window):
    layout = Layout.of_shapes(SHAPES, 100)
    assert layout.n_params == N
    start, stop = sorted(window)
    params = parameters(layout, kind)
    expected = flat(params)
    out = torch.full((stop - start,), torch.nan)
    layout.read(params, start, stop, out)
    assert torch.equal(out, expected[start:stop])

    layout.write(params, start, stop, -out)
    expected[start:stop] = -out
    assert torch.equal(flat(params), expected)


def test_writing_keeps_storage_strides_and_dtype():
    layout = Layout.of_shapes([("wte.weight", (4, 6)), ("h.0.conv.weight", (2, 3, 4, 5))], 50)
    params = [
        torch.zeros(6, 4, dtype=torch.bfloat16).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(),
    ]
    before = [(p.data_ptr(), p.stride(), p.dtype) for p in params]
    values = torch.arange(layout.n_params, dtype=torch.float32)
    layout.write(params, 0, layout.n_params, values)
    assert [(p.data_ptr(), p.stride(), p.dtype) for p in params] == before
    assert params[1].grad_fn is None
    out = torch.empty(layout.n_params)
    layout.read(params, 0, layout.n_params, out)
    assert torch.equal(out, values)


def test_reading_a_bf16_parameter_gives_its_exact_values():
    layout = Layout.of_shapes([("wte.weight", (30, 10))], 64)
    param = torch.randn(30, 10, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    out = torch.empty(64)
    layout.read([param], 64, 128, out)
    assert torch.equal(out, param.float().view(-1)[64:128])


def test_the_digest_depends_on_names_shapes_and_cuts_but_not_on_the_order_of_blocks_given():
    base = Layout.of_shapes(SHAPES, 100)
    assert len(base.digest) == 16
    assert Layout.of_shapes(list(SHAPES), 100).digest == base.digest
    others = [
        Layout.of_shapes(SHAPES, 99),
        Layout.of_shapes([("lm_head.wait", (50, 12)), *SHAPES[1:]], 100),
        Layout.of_shapes([("lm_head.weight", (12, 50)), *SHAPES[1:]], 100),
        Layout.of_shapes(SHAPES[:-1], 100),
    ]
    assert len({base.digest, *(layout.digest for layout in others)}) == 5
    head_last = Layout.of_shapes([*SHAPES[1:], SHAPES[0]], 100)
    assert head_last.digest == base.digest


def test_a_model_without_parameters_has_no_chunks():
    layout = Layout.of_shapes([("model.nothing", (0, 3))], 10)
    assert (layout.n_params, layout.chunks) == (0, ())
    layout.read([torch.zeros(0, 3)], 0, 0, torch.empty(0))


@given(st.integers(1, 10**10), st.sampled_from([4.0, 2.0, 1.4, 1.008, 0.508]), st.integers(1, 1 << 24))
@QUICK
def test_a_chunk_fits_its_bytes_and_small_models_still_have_many(n_params, bytes_per_value, chunk_bytes):
    size = chunk_elements(n_params, bytes_per_value, chunk_bytes)
    assert size >= 1024
    assert size % 256 == 0
    if size > 1024:
        assert size * bytes_per_value <= chunk_bytes
        assert n_params // size >= 32


def test_a_chunk_of_a_large_model_is_about_the_bytes_asked_for():
    assert 0.99 <= chunk_elements(1_500_000_000, 1.0, 1 << 20) / (1 << 20) <= 1.0
