"""Amounts as people read them."""

from __future__ import annotations

import math

import pytest

from quantkit import quantities

SAID = [
    (quantities.number, 0.0123456, "0.0123"),
    (quantities.number, 1234.5, "1,234"),
    (quantities.number, 0.000012345, "1.23e-05"),
    (quantities.number, None, "-"),
    (quantities.number, math.inf, "∞"),
    (quantities.number, 0.0, "0"),
    (quantities.short, 14.0, "14"),
    (quantities.short, 3.5, "3.5"),
    (quantities.short, 130.0, "130"),
    (quantities.short, 1200.0, "1,200"),
    (quantities.short, 1e-7, "1.00e-07"),
    (quantities.percent, 98.86, "98.9 %"),
    (quantities.percent, None, "-"),
    (quantities.as_percent, 0.0751, "7.5 %"),
    (quantities.as_percent, 0.5, "50 %"),
    (quantities.as_percent, 1.73, "173 %"),
    (lambda count: quantities.counted(count, "gate"), 1, "1 gate"),
    (lambda count: quantities.counted(count, "gate"), 1200, "1,200 gates"),
    (quantities.times, 1.61, "1.6x"),
    (quantities.times, 12.3, "12x"),
    (quantities.byte_size, 0, "0 bytes"),
    (quantities.byte_size, 1, "1 byte"),
    (quantities.byte_size, 1023, "1023 bytes"),
    (quantities.byte_size, 1024, "1.0 KiB"),
    (quantities.byte_size, 1048575, "1.0 MiB"),
    (quantities.byte_size, 3 << 29, "1.5 GiB"),
    (quantities.byte_size, 5 << 60, "5120.0 PiB"),
    (quantities.byte_size, None, "-"),
    (quantities.decimal_bytes, 850e3, "850 kB"),
    (quantities.decimal_bytes, 12.34e6, "12.3 MB"),
    (quantities.decimal_bytes, 4.654e9, "4.65 GB"),
    (quantities.duration, 3.1e-6, "3.10 us"),
    (quantities.duration, 0.00031, "0.310 ms"),
    (quantities.duration, 0.0123, "12.3 ms"),
    (quantities.duration, 2.5, "2.50 s"),
    (quantities.duration, 0.0, "0 s"),
    (quantities.duration, None, "-"),
    (quantities.elapsed, 0.04, "0.0 s"),
    (quantities.elapsed, 9.94, "9.9 s"),
    (quantities.elapsed, 42.3, "42 s"),
    (quantities.elapsed, 100, "1 min 40 s"),
    (quantities.elapsed, 7500, "2 h 5 min"),
    (quantities.elapsed, 3599.7, "1 h 0 min"),
    (quantities.scaled_count, 8.03e9, "8.03 B"),
    (quantities.scaled_count, 671e9, "671 B"),
    (quantities.scaled_count, 12, "12"),
    (quantities.scaled_count, 3.4e6, "3.40 M"),
    (quantities.rounded_count, 1.66, "1.7"),
    (quantities.rounded_count, 12.3, "12"),
    (quantities.rounded_count, 14317, "14,300"),
]


@pytest.mark.parametrize(("say", "value", "text"), SAID)
def test_amounts_are_said_alike_everywhere(say, value, text):
    assert say(value) == text
