"""Shared state, pure: digests, election, and what is fetched from whom."""
