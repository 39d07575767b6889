"""The limit of open files of this process, raised for a server: service managers start jobs with a low limit."""

import resource
import sys

_DESCRIPTORS = 10240  # the most that macOS grants by default


def raise_descriptor_limit() -> None:
    """Raise the limit of open files of this process and its children: launchd starts its jobs with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def descriptor_limit() -> int:
    """Return the number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
