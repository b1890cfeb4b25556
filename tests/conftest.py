"""What is the same for every test: one profile for property tests, and a Ctrl-C that arrives."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "deterministic",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("deterministic")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it runs behind
    signal.signal(signal.SIGINT, signal.default_int_handler)
