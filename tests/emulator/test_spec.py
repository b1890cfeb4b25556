"""Links as people write them: units, defaults, errors, and back to text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.stress.emulator import LinkSpec

RATES = st.none() | st.integers(1_000, 1_000_000_000_000)
TIMES = st.floats(0, 60, allow_nan=False)
SPECS = st.builds(
    LinkSpec,
    rate_bps=RATES,
    rtt_s=TIMES,
    flow_bps=RATES,
    jitter_s=TIMES,
    window_bytes=st.none() | st.integers(1024, 1 << 30),
    corrupt=st.floats(0, 1),
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", LinkSpec()),
        (
            "rate=200mbit,rtt=80ms,flow=100mbit,jitter=2ms,window=8mib",
            LinkSpec(200_000_000, 0.08, 100_000_000, 0.002, 8_388_608),
        ),
        ("rtt=1.5s, rate=1gbit", LinkSpec(rate_bps=1_000_000_000, rtt_s=1.5)),
        ("RATE=0.5Mbit", LinkSpec(rate_bps=500_000)),
        ("jitter=250us,window=64kib", LinkSpec(jitter_s=0.00025, window_bytes=65_536)),
        ("flow=20000bit,window=5000b", LinkSpec(flow_bps=20_000, window_bytes=5_000)),
        ("corrupt=0.1%", LinkSpec(corrupt=0.001)),
    ],
)
def test_text_is_understood(text: str, spec: LinkSpec) -> None:
    assert LinkSpec.parse(text) == spec


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate=200", r"rate=200 is not understood; .* one of bit, kbit, mbit or gbit, such as "),
        ("rate=fast", "rate=fast is not understood"),
        ("rate=-5mbit", "rate=-5mbit is not understood"),
        ("rtt=80", r"one of us, ms or s, such as rtt=80ms"),
        ("window=8mb", r"one of b, kib, mib or gib, such as window=8mib"),
        ("delay=80ms", r"'delay=80ms' is not a part of a link; .* of rate=200mbit, rtt=80ms"),
        ("rate", "'rate' is not a part of a link"),
        (",", "'' is not a part of a link"),
        ("rtt=1ms,", "'' is not a part of a link"),
        ("rtt=1ms,rtt=2ms", "rtt is given twice"),
        ("rate=0bit", "rate must be between 1kbit and 1000gbit"),
        ("flow=2000gbit", "flow must be between 1kbit and 1000gbit"),
        ("rtt=61s", "rtt must be between 0ms and 60s"),
        ("jitter=100s", "jitter must be between 0ms and 60s"),
        ("corrupt=0.1", "corrupt=0.1 is not understood; write a number and its unit, %, such as"),
        ("corrupt=101%", "corrupt must be between 0% and 100%"),
        ("window=100b", "window must be between 1kib and 1gib"),
        ("rate=" + "9" * 60 + "bit", "is not understood"),
    ],
)
def test_what_is_wrong_is_said(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LinkSpec.parse(text)


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -0.001])
def test_times_are_times(time_s: float) -> None:
    with pytest.raises(ValueError, match="rtt must be between"):
        LinkSpec(rtt_s=time_s)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (LinkSpec(), ""),
        (LinkSpec(rate_bps=200_000_000, rtt_s=0.08), "rate=200mbit,rtt=80ms"),
        (LinkSpec(rate_bps=1_500_000, jitter_s=0.0002), "rate=1500kbit,jitter=200us"),
        (LinkSpec(rtt_s=20.0, window_bytes=1 << 20), "rtt=20s,window=1mib"),
        (LinkSpec(rtt_s=0.0125), "rtt=12.5ms"),
        (LinkSpec(corrupt=0.000025), "corrupt=0.0025%"),
    ],
)
def test_text_is_the_shortest(spec: LinkSpec, text: str) -> None:
    assert str(spec) == text


@given(SPECS)
def test_text_and_back(spec: LinkSpec) -> None:
    assert LinkSpec.parse(str(spec)) == spec


@given(st.text(max_size=40))
def test_any_text_is_a_link_or_a_value_error(text: str) -> None:
    try:
        spec = LinkSpec.parse(text)
    except ValueError:
        return
    assert LinkSpec.parse(str(spec)) == spec


def test_default_window_covers_the_product() -> None:
    # 100 Mbit/s for 60 ms are 750,000 bytes, and 40 ms of waiting 500,000; 256 KiB on top.
    spec = LinkSpec.parse("rate=500mbit,rtt=60ms,flow=100mbit")
    assert spec.slowest_bps == 100_000_000
    assert spec.flight_max_bytes == 750_000 + 500_000 + 262_144
    assert LinkSpec.parse("rtt=10ms").flight_max_bytes == 16 << 20
    assert LinkSpec.parse("rate=1000gbit,rtt=60s").flight_max_bytes == 1 << 30
    assert LinkSpec.parse("rate=1gbit,window=10kib").flight_max_bytes == 10_240
