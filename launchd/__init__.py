"""The service managers that keep the agent running: launchd on macOS, systemd on Linux."""
