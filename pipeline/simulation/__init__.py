"""The parts of a simulated run: stage durations, shared cores, a virtual clock, and what-if changes.

`pipeline/simulation/virtual_run.py` runs the scheduler on them; `pipeline/simulate.py` is the command.
"""
