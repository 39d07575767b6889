"""Agents and libraries of npm as clients of the gateway: `make test-agents`."""
