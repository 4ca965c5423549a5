"""Policies of other systems, for the simulator: `policy.py` is the shape of all, `names.py` makes them by name."""
