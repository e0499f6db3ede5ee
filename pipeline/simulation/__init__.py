"""What a simulated run is made of: seconds of stages, cores that are shared, a virtual clock, and what may be changed.

`pipeline/simulation/virtual_run.py` runs the scheduler on it, `pipeline/simulate.py` is the command.
"""
