"""Breaks real runs at random, and checks that each still trains every sample once, to the same weights.

    python -m tests.chaos --minutes 30 --seed 7

A seed decides the executor, the faults and when they come. `faults` breaks something, `ordeal` brings a broken run to
its end, and the journal's checker has the last word.
"""
