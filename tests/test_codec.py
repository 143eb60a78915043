"""Codecs against plain references, in what they promise of the mean, and on payloads from strangers."""

from __future__ import annotations

import math
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import codec
from peer.codec import BLOCK, by_id, by_name, chunk_seed
from peer.errors import FrameError

QUICK = settings(derandomize=True, max_examples=60, deadline=None)
SIZES = [0, 1, 2, 255, 256, 257, 511, 1024, 4099]

every_codec = pytest.mark.parametrize("name", codec.NAMES)
blockwise = pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])


def randoms(n: int, seed: int = 1, size: float = 1e-3) -> torch.Tensor:
    """Return values whose blocks differ in magnitude, as parameters of different layers do."""
    generator = torch.Generator().manual_seed(seed)
    loudness = torch.exp(torch.randn(n // BLOCK + 1, generator=generator)).repeat_interleave(BLOCK)[:n]
    return torch.randn(n, generator=generator) * loudness * size


def through(name: str, values: torch.Tensor, seed: int = 5) -> torch.Tensor:
    return by_name(name).decode(by_name(name).encode(values, seed), len(values))


def steps_of(payload: bytes, n: int, levels: int) -> list[float]:
    """Read the step of each value off a blockwise payload, by its description alone."""
    (multiplier,) = struct.unpack_from("<f", payload)
    scales = struct.unpack_from(f"<{-(-n // BLOCK)}e", payload, 4)
    return [scales[index // BLOCK] * multiplier / levels for index in range(n)]


def reference_decode(payload: bytes, n: int, levels: int) -> torch.Tensor:
    body = payload[4 + 2 * -(-n // BLOCK) :]
    if levels == 127:
        whole = list(struct.unpack(f"<{n}b", body))
    else:
        whole = [byte - 8 for byte in [*(b & 15 for b in body), *(b >> 4 for b in body)]][:n]
    values = [number * step for number, step in zip(whole, steps_of(payload, n, levels), strict=True)]
    return torch.tensor(values, dtype=torch.float64)


# What is written.


@every_codec
@pytest.mark.parametrize("n", SIZES)
def test_a_payload_is_as_large_as_announced_and_the_same_twice(name, n):
    values = randoms(n)
    payload = by_name(name).encode(values, 9)
    assert isinstance(payload, bytes)
    assert len(payload) <= by_name(name).max_size(n)
    if name != "bf16":
        assert len(payload) == by_name(name).size(n) == by_name(name).max_size(n)
    assert by_name(name).encode(values, 9) == payload
    assert torch.equal(by_name(name).decode(memoryview(payload), n), by_name(name).decode(payload, n))


@every_codec
def test_bits_a_value_are_those_the_layout_counts_with(name):
    n = 1 << 16
    of = by_name(name)
    assert of.bits == pytest.approx(8 * of.size(n) / n, rel=1e-3)
    assert len(of.encode(randoms(n), 1)) == pytest.approx(of.size(n), rel=0.05)


@every_codec
def test_encoding_leaves_the_values_alone_and_decoding_gives_fresh_memory(name):
    values = randoms(1000)
    before = values.clone()
    decoded = through(name, values)
    assert torch.equal(values, before)
    decoded.add_(1)  # a result is summed into in place
    assert (decoded.dtype, decoded.shape) == (torch.float32, (1000,))


def test_fp32_is_exact_to_the_bit():
    values = torch.tensor([0.0, -0.0, 1e-45, -3.4e38, 1 / 3])
    assert torch.equal(through("fp32", values).view(torch.int32), values.view(torch.int32))
    assert [name for name in codec.NAMES if by_name(name).exact] == ["fp32"]


@pytest.mark.parametrize("n", SIZES)
def test_bf16_is_pytorchs_rounding(n):
    values = randoms(n)
    assert torch.equal(through("bf16", values), values.to(torch.bfloat16).float())


def test_bf16_takes_what_the_method_counts_with():
    """Split byte planes: 1.43x of 16 bit (ALGORITHM.md sec. 6)."""
    n = 1 << 18
    values = torch.randn(n, generator=torch.Generator().manual_seed(3)) * 0.02
    assert 2 * n / len(by_name("bf16").encode(values, 0)) == pytest.approx(1.43, rel=0.05)


@blockwise
@pytest.mark.parametrize("n", SIZES)
def test_blockwise_decoding_is_as_described(name, levels, n):
    payload = by_name(name).encode(randoms(n), 3)
    expected = reference_decode(payload, n, levels)
    torch.testing.assert_close(by_name(name).decode(payload, n).double(), expected, rtol=1e-6, atol=0)


@blockwise
def test_the_error_is_at_most_a_step_and_half_of_one_when_rounding_to_nearest(name, levels):
    values = randoms(5000)
    payload = by_name(name).encode(values, 3)
    steps = torch.tensor(steps_of(payload, 5000, levels))
    error = (by_name(name).decode(payload, 5000) - values).abs() / steps
    assert float(error.max()) <= (0.5 if name == "int8" else 1.0) + 1e-4
    peaks = torch.stack([block.abs().max() for block in values.split(BLOCK)])
    assert float((steps[::BLOCK] * levels / peaks).max()) <= 1.001  # steps are no coarser than they must be


@every_codec
@pytest.mark.parametrize("n", [1, 256, 1000])
def test_zeros_stay_exact_zeros(name, n):
    assert torch.equal(through(name, torch.zeros(n)), torch.zeros(n))


@blockwise
def test_zeros_between_other_values_stay_exact_zeros(name, levels):
    values = randoms(2048)
    values[512:1024] = 0
    assert torch.equal(through(name, values)[512:1024], torch.zeros(512))


@blockwise
@pytest.mark.parametrize("size", [1e-20, 1e-9, 1e-3, 1.0, 1e10, 1e30])
def test_magnitude_does_not_matter(name, levels, size):
    values = randoms(2000) * 1e3 * size
    decoded = through(name, values)
    assert torch.isfinite(decoded).all()
    error = (decoded.double() - values.double()).norm() / values.double().norm()
    assert float(error) < (0.01 if levels == 127 else 0.3)


@blockwise
def test_a_tiny_block_survives_beside_a_huge_one(name, levels):
    values = torch.cat([torch.ones(256), torch.full((256,), 1e-9)])
    decoded = through(name, values)
    assert float(decoded[256:].mean()) == pytest.approx(1e-9, rel=0.05)


@pytest.mark.parametrize("n", [1, 100, 5000, 200_000])
def test_values_that_do_not_compress_still_fit_the_largest_legal_payload(n):
    bits = torch.randint(0, 0x7F80, (n,), generator=torch.Generator().manual_seed(4))  # every finite exponent
    values = bits.to(torch.int16).view(torch.bfloat16).float()
    assert len(by_name("bf16").encode(values, 0)) <= by_name("bf16").max_size(n)
    assert torch.equal(through("bf16", values), values)


@every_codec
def test_coding_draws_nothing_from_the_generator_that_training_uses(name):
    before = torch.get_rng_state()
    through(name, randoms(1000))
    assert torch.equal(torch.get_rng_state(), before)


# What rounding does to means.


def test_int4_rounding_is_unbiased():
    """And so at every block's largest value, where a scale rounded down would clip."""
    values, draws = randoms(512, seed=8), 3000
    steps = torch.tensor(steps_of(by_name("int4").encode(values, 0), 512, 7))
    mean = torch.stack([through("int4", values, seed) for seed in range(draws)]).double().mean(0)
    error = (mean - values) / steps
    assert float(error.abs().max()) < 5 * 0.5 / math.sqrt(draws)
    assert abs(float(error.mean())) < 5 * 0.5 / math.sqrt(draws * 512)


def test_int4_rounding_does_not_freeze_small_coordinates():
    values = torch.full((256,), 0.002)
    values[0] = 1.0
    moved = sum(through("int4", values, seed)[1:] for seed in range(400))
    assert float(moved.mean()) == pytest.approx(400 * 0.002, rel=0.1)


def test_another_seed_rounds_otherwise_and_only_int4_asks_for_it():
    values = randoms(1000)
    differ = {name: by_name(name).encode(values, 1) != by_name(name).encode(values, 2) for name in codec.NAMES}
    assert differ == {"fp32": False, "bf16": False, "int8": False, "int4": True}


@every_codec
def test_the_difference_form_keeps_a_pairs_mean_whatever_the_codec(name):
    """ALGORITHM.md sec. 6: Dm_i = D_i + w (q(D_j) - q(D_i))."""
    a, b = randoms(3000, seed=1), randoms(3000, seed=2)
    sent_a, sent_b = through(name, a, seed=11), through(name, b, seed=12)
    mixed_a, mixed_b = a + 0.5 * (sent_b - sent_a), b + 0.5 * (sent_a - sent_b)
    before, after = (a.double() + b.double()) / 2, (mixed_a.double() + mixed_b.double()) / 2
    assert float((after - before).norm() / before.norm()) < 1e-7
    if name in ("fp32", "bf16", "int8"):  # and it does mix
        assert float((mixed_a - mixed_b).norm() / (a - b).norm()) < 0.02


# What strangers send.


def refused(name: str, payload: bytes, n: int) -> str:
    with pytest.raises(FrameError) as caught:
        by_name(name).decode(payload, n)
    return caught.value.reason


@every_codec
def test_cut_or_padded_payloads_are_refused(name):
    n = 600
    payload = by_name(name).encode(randoms(n), 1)
    for cut in {0, 1, 3, 4, 5, 9, len(payload) // 2, len(payload) - 1}:
        assert refused(name, payload[:cut], n) in ("size", "codec")
    for tail in (b"\0", b"trailing garbage", payload):
        assert refused(name, payload + tail, n) in ("size", "codec")
    assert refused(name, payload, n - 256) in ("size", "codec")
    assert refused(name, payload, n + 256) in ("size", "codec")


@every_codec
def test_a_payload_is_looked_at_before_memory_is_taken_for_its_values(name):
    payload = by_name(name).encode(randoms(1000), 1)
    assert refused(name, payload, 1 << 44) in ("size", "codec")


@every_codec
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_payload_may_lie_anywhere_in_a_message(name, offset):
    payload = by_name(name).encode(randoms(1001), 1)
    inside = memoryview(bytes(offset) + payload + b"rest")[offset:-4]
    assert torch.equal(by_name(name).decode(inside, 1001), by_name(name).decode(payload, 1001))


@every_codec
@given(payload=st.binary(max_size=400), n=st.integers(0, 300))
@QUICK
def test_any_bytes_decode_to_finite_values_or_are_refused(name, payload, n):
    try:
        decoded = by_name(name).decode(payload, n)
    except FrameError:
        return
    assert len(decoded) == n
    assert torch.isfinite(decoded).all()


@every_codec
@given(at=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), n=st.sampled_from([1, 256, 700]))
@QUICK
def test_an_altered_byte_never_gives_a_non_finite_value(name, at, bits, n):
    payload = bytearray(by_name(name).encode(randoms(n), 1))
    payload[int(at * len(payload))] ^= bits
    try:
        decoded = by_name(name).decode(bytes(payload), n)
    except FrameError:
        return
    assert len(decoded) == n
    assert torch.isfinite(decoded).all()


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused_by_whoever_decodes_them(name, bad):
    values = randoms(700)
    values[600] = bad
    assert refused(name, by_name(name).encode(values, 1), 700) == "nonfinite"


@blockwise
@pytest.mark.parametrize(
    ("multiplier", "scale", "reason"),
    [
        (math.nan, 1.0, "nonfinite"),
        (math.inf, 0.0, "nonfinite"),
        (1.0, math.nan, "nonfinite"),
        (1.0, math.inf, "nonfinite"),
        (3e38, 60000.0, "nonfinite"),
        (-1.0, 1.0, "codec"),
        (1.0, -1.0, "codec"),
    ],
)
def test_scales_that_no_encoder_writes_are_refused(name, levels, multiplier, scale, reason):
    body = b"\x80" * (256 if levels == 127 else 128)
    assert refused(name, struct.pack("<fe", multiplier, scale) + body, 256) == reason


@pytest.mark.parametrize("codec_id", [-1, 0, 5, 2**31])
def test_an_unknown_codec_is_refused(codec_id):
    with pytest.raises(FrameError, match="codec"):
        by_id(codec_id)


def test_codecs_are_found_by_name_and_by_their_number_on_the_wire():
    assert [(name, by_name(name).wire_id) for name in codec.NAMES] == [
        ("fp32", 1),
        ("bf16", 2),
        ("int8", 3),
        ("int4", 4),
    ]
    assert all(by_id(by_name(name).wire_id) is by_name(name) for name in codec.NAMES)


N = 70_000  # large enough for a frame to write its size in four bytes


def bf16_payload(high: bytes) -> bytes:
    low = zstandard.ZstdCompressor().compress(bytes(N))
    return len(high).to_bytes(4, "little") + high + low


def unsized(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return compressor.compress(data) + compressor.flush()


def lying(size: int) -> bytes:
    """Return a frame of `size` bytes whose header says N."""
    frame = zstandard.ZstdCompressor().compress(bytes(size))
    declared = size.to_bytes(4, "little")
    assert frame.count(declared) == 1
    return frame.replace(declared, N.to_bytes(4, "little"))


BOMBS = {
    "declares more": lambda: zstandard.ZstdCompressor().compress(bytes(64 << 20)),
    "declares a terabyte": lambda: b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\0\0",
    "declares nothing": lambda: unsized(bytes(64 << 20)),
    "holds more than it declares": lambda: lying(64 << 20),
    "holds less than it declares": lambda: lying(65_900),
    "a second frame behind": lambda: zstandard.ZstdCompressor().compress(bytes(N)) * 2,
    "a skippable frame": lambda: b"\x50\x2a\x4d\x18" + N.to_bytes(4, "little") + bytes(100),
    "no frame": lambda: b"garbage" * 10,
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_zstd_bombs_are_refused_before_they_take_memory(bomb):
    payload = bf16_payload(bomb())
    tracemalloc.start()
    try:
        assert refused("bf16", payload, N) in ("size", "codec")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * N


def test_a_size_of_the_first_plane_past_the_end_is_refused():
    payload = bf16_payload(zstandard.ZstdCompressor().compress(bytes(N)))
    assert by_name("bf16").decode(payload, N).numel() == N  # the forger above is otherwise right
    assert refused("bf16", b"\xff\xff\xff\xff" + payload[4:], N) == "codec"


# What it costs, and seeds.


def test_any_thread_may_use_any_codec():
    """A zstandard object shared by threads corrupts data, once silently."""

    def work(number: int) -> bool:
        values = randoms(3000, seed=number)
        expected = values.to(torch.bfloat16).float()
        return all(torch.equal(through("bf16", values), expected) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_growth(work) -> int:
    """Return by how many bytes resident memory grew at most while `work` ran."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = resident_bytes("VmRSS")
    work()
    return resident_bytes("VmHWM") - before


@every_codec
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's peak resident memory")
def test_a_call_takes_at_most_three_times_the_chunk(name):
    n = 10_000_000  # over malloc's largest threshold, so that every buffer comes and goes
    of = by_name(name)
    values = torch.ones(n)
    payload = of.encode(values, 1)
    assert peak_growth(lambda: of.encode(values, 1)) < 3 * 4 * n
    assert peak_growth(lambda: of.decode(payload, n)) < 3 * 4 * n


def test_chunk_seeds_differ_in_every_part_and_fit_63_bits():
    base = (bytes(16), 1, "mix1", 2, "a")
    others = [(b"x" * 16, 1, "mix1", 2, "a"), (bytes(16), 2, "mix1", 2, "a"), (bytes(16), 1, "mix2", 2, "a")]
    others += [(bytes(16), 1, "mix1", 3, "a"), (bytes(16), 1, "mix1", 2, "b"), (bytes(16), 12, "mix1", 2, "a")]
    seeds = [chunk_seed(*place) for place in (base, *others)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert chunk_seed(*base) == seeds[0]
