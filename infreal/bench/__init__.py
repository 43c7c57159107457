"""Benchmarks of the real backend. GPU scripts: torch, triton and numpy are all they need; CSV and text are what they write."""
