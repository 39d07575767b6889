"""Supervision of each process, from assignment to Stopped: state machine, runner, supervisor."""
