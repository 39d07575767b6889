"""The traffic of services on hosts: the sum of what agents report of their processes.

An agent writes the numbers of a process once a minute at most, and only if they have changed by more than a tenth.
"""

from typing import Final

from controller.reconcile.plan import Snapshot, decode_stored
from controller.services.metal_processes import read_hosts
from controller.services.rollout import is_host_lost
from controller.services.traffic import UNKNOWN_TRAFFIC, Traffic, combine_traffic, differs_notably
from crds.metalprocess import MetalProcess
from crds.rate import MOST_REPORTED
from kube.resources import METAL_PROCESSES

MOST_REQUESTS_REPORTED: Final = 1_000_000
"""Requests per minute that are believed of one process of a host."""


def find_host_traffic(snapshot: Snapshot, namespace: str, service_uid: str) -> Traffic:
    """Return the traffic of a service on hosts: the sum of what its processes report that serve on live hosts.

    A process that reports a negative number is left out, and excessive numbers are cut.
    """
    children = snapshot.children(METAL_PROCESSES, namespace, service_uid)
    processes = decode_stored(snapshot.store, METAL_PROCESSES, children, MetalProcess)
    hosts = read_hosts(snapshot.store, {process.spec.host_name for process in processes})

    traffic = UNKNOWN_TRAFFIC
    for process in processes:
        # Only what serves on a live host counts.
        status = process.status
        if status.phase != "Ready" or is_host_lost(process.spec.host_name or "", hosts):
            continue

        # A negative number tells that the report is wrong.
        rate, requests, average_ms = status.tokens_per_second, status.requests_per_minute, status.average_latency_ms
        if (requests is not None and requests < 0) or (average_ms is not None and average_ms < 0):
            continue

        # Cut excessive numbers, and add the rest up.
        reported = Traffic(
            requests_per_minute=min(requests, MOST_REQUESTS_REPORTED) if requests is not None else None,
            average_ms=average_ms,
            tokens_per_second=min(float(rate), MOST_REPORTED) if rate else None,
        )
        traffic = combine_traffic(traffic, reported)
    return traffic


def add_host_traffic(of_pods: Traffic, of_hosts: Traffic, shown: Traffic) -> Traffic:
    """Return the sum of the traffic in pods and on hosts; or `shown`, that of the status, if the sum hardly differs."""
    if of_hosts == UNKNOWN_TRAFFIC:
        return of_pods
    total = combine_traffic(of_pods, of_hosts)
    return total if differs_notably(shown, total) else shown
