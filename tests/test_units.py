"""Quantities and addresses as operators write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer.config import (
    Address,
    format_duration,
    format_rate,
    format_size,
    parse_address,
    parse_duration,
    parse_rate,
    parse_size,
)
from peer.errors import AddressError


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_duration, "250ms", 0.25),
        (parse_duration, "30s", 30),
        (parse_duration, "30", 30),
        (parse_duration, "1.5 m", 90),
        (parse_duration, "2h", 7200),
        (parse_size, "1MiB", 1 << 20),
        (parse_size, "64kib", 1 << 16),
        (parse_size, "5MB", 5_000_000),
        (parse_size, "17", 17),
        (parse_rate, "100mbit", 100_000_000),
        (parse_rate, "100Mbit/s", 100_000_000),
        (parse_rate, "20Mbps", 20_000_000),
        (parse_rate, "1gbit", 1_000_000_000),
        (parse_rate, "9600bps", 9600),
    ],
)
def test_a_quantity_becomes_its_base_unit(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize("parse", [parse_duration, parse_size, parse_rate])
@pytest.mark.parametrize("text", ["", "s", "-1s", "1 1s", "1e999", "nan", "inf", "1x", "1,5s", "0x10", "٣s", "1s\n1s"])
def test_what_is_no_quantity_is_refused_with_an_example(parse, text):
    with pytest.raises(ValueError, match=r"must be a .* such as"):
        parse(text)


def test_bytes_are_never_taken_for_bits_nor_bits_for_bytes():
    for text in ("100MB", "100MB/s", "100MBps", "100MiB"):
        with pytest.raises(ValueError, match="rate in bits"):
            parse_rate(text)
    with pytest.raises(ValueError, match="a size"):
        parse_size("100mbit")


@given(st.integers(0, 1 << 50))
def test_whole_quantities_are_written_as_they_are_read(number):
    assert parse_size(format_size(number)) == number
    assert parse_rate(format_rate(number)) == number
    assert parse_duration(format_duration(number)) == pytest.approx(number)


@given(st.integers(1, 999))
def test_milliseconds_are_written_as_they_are_read(number):
    assert parse_duration(format_duration(number / 1000)) == pytest.approx(number / 1000)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("[::1]:1", Address("::1", 1)),
        ("peer-3.example.org:65535", Address("peer-3.example.org", 65535)),
        ("my_service:7700", Address("my_service", 7700)),
        ("xn--bcher-kva.example:1", Address("xn--bcher-kva.example", 1)),
    ],
)
def test_an_address_is_read_and_written_alike(text, address):
    assert parse_address(text) == address
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://h:1", "leave out the scheme"),
        ("h", "the port is missing"),
        ("", "the port is missing"),
        ("::1:1", "brackets"),
        ("[h]:1", "must be an IPv6 address"),
        ("[127.0.0.1]:1", "must be an IPv6 address"),
        (" h:1", "without spaces"),
        ("h:1\n", "without spaces"),
        ("h:\x001", "only printable"),
        ("bücher:1", "only printable ASCII"),
        ("h:99999", "the port must be a number from 0 to 65535"),
        ("h:-1", "the port must be a number"),
        ("h:", "the port must be a number"),
        ("h:http", "the port must be a number"),
        (":1", "the host is missing"),
        ("256.0.0.1:1", "neither a name nor an IP address"),
        ("1.2.3:1", "neither a name nor an IP address"),
        ("-h:1", "neither a name nor an IP address"),
        ("h/path:1", "leave out the scheme and the path"),
        ("u@h:1", "neither a name nor an IP address"),
    ],
)
def test_what_is_no_address_is_refused_with_the_offending_text(text, problem):
    with pytest.raises(AddressError) as error:
        parse_address(text)
    assert problem in str(error.value)
    assert repr(text) in str(error.value)


def test_port_zero_is_only_for_listening():
    with pytest.raises(AddressError, match="from 1 to 65535"):
        parse_address("h:0", any_port=False)


def test_loopback_and_any_are_told_from_the_rest():
    assert all(parse_address(t).is_loopback for t in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"))
    assert not any(parse_address(t).is_loopback for t in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.example:1"))
    assert all(parse_address(t).is_any for t in ("0.0.0.0:1", "[::]:1"))
    assert not any(parse_address(t).is_any for t in ("127.0.0.1:1", "name:1"))
