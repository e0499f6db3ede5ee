"""The scheduler: events in, decisions out. Pure: no clock, no I/O, no Ray."""
