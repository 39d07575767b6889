"""A kubelet whose containers are local processes: what tests and the demo run pods on, without root or a runtime.

It keeps the promises that the Kubernetes documentation makes of a kubelet, for the parts it has; `tests/unit/kubelet`
and `tests/cluster/kubelet` hold one test for each. It has no sidecar containers, lifecycle hooks, gRPC probes or host
namespaces: a pod that asks for one is Failed with a message that names the field, never run without it. It has no
cgroups, other users, cluster DNS, service links or Events either; what a pod says of those has no effect. Containers
outlive their kubelet, as documented; the next one kills them when it starts and restarts what the policy allows.
"""
