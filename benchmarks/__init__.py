"""What Pomona takes, in time and memory, beside a floor. `python -m benchmarks.NAME` prints one figure's table."""
