"""Benchmarks, one file per claim. Each prints its table and, with `--out`, writes JSON."""
