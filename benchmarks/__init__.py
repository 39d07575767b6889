"""Time and memory that Pomona takes, each figure beside a floor that no implementation could go below here.

`python -m benchmarks.NAME` prints a table. `servers` has the stand-ins of engines, and the proxy that is the floor.
"""
