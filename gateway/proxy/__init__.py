"""The proxy in front of a host's inference processes, a process of its own."""
