"""Benchmarks of kvadmit: programs for people, not part of the installed package."""
