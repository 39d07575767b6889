"""`pomona proxy` that takes a fraction of a second for a long silence, so that a test can wait for its suspicion."""

from unittest import mock

from cli.main import main
from gateway.proxy import backend_health, health_monitor

if __name__ == "__main__":
    with (
        mock.patch.object(backend_health, "SHORTEST_SILENCE_SECONDS", 0.5),
        mock.patch.object(backend_health, "SHORTEST_WAIT_SECONDS", 0.5),
        mock.patch.object(backend_health, "FIRST_ANSWER_SECONDS", 1.0),
        mock.patch.object(health_monitor, "CHECK_SECONDS", 0.05),
    ):
        main()
