"""Tests whose cost is their harness, and the driver that runs and times them.

The same classes derive from stock, from torch's own continuous class or from ours, as the arm has
it. Bodies note what only a worker can know (moments, its memory) in a file.
"""
