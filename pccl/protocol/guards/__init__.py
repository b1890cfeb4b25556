"""What comes from outside is bounded here: each part counts, and says what is too much.

* ``texts``: texts of others, as they may be kept and shown.
* ``source_shares``: what one address may take of a port.
* ``guessing``: how hard a secret is to guess.
* ``log_quota``: lines of the log about strangers.
* ``allowance``: bytes of messages, by who sends them.
* ``early_store``: frames that arrive before their operation.
"""
