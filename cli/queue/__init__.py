"""Commands about the queue for accelerators and hosts."""
