"""Benchmarks, one file a claim. Each prints its table and, with `--out`, writes JSON."""
