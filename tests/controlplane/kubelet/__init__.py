"""A kubelet whose containers are local processes: tests and the demo run pods on it, without root or a runtime.

The implemented parts behave as the Kubernetes documentation promises; `tests/unit/controlplane/kubelet` and
`tests/cluster/controlplane/kubelet` have one test for each promise. There are no lifecycle hooks but a sleep before the
stop, gRPC probes or host namespaces: a pod that uses one becomes Failed with a message that names the field, and is
never run without it. There are no cgroups, other users, service links or Events either; such fields of a pod have no
effect, and neither has `dnsPolicy`: names are those of `--cluster-dns`, or there are none. Containers outlive their
kubelet, as documented; the next kubelet kills them when it starts and restarts those that the policy allows.
"""
