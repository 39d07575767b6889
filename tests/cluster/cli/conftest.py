"""Fixtures of the main job, for the commands of people."""

from tests.cluster.main_job.conftest import cluster, cluster_members, files, host

__all__ = ["cluster", "cluster_members", "files", "host"]
