"""What a simulated run is made of: seconds of stages, cores that are shared, a virtual clock, and what may be changed.

`pipeline/executors/simulated.py` runs the scheduler on it, `pipeline/simulate.py` is the command.
"""
