"""A kubelet whose containers are local processes: what tests and the demo run pods on, without root or a runtime.

It keeps the promises that the Kubernetes documentation makes of a kubelet, for the parts it has; `tests/unit/kubelet`
and `tests/cluster/test_kubelet.py` hold one test for each. It has no cgroups, no cluster DNS, no service links, no
ephemeral or sidecar containers, no lifecycle hooks and no host networking: a pod that asks for one of the latter is
Failed with a message that names the field, never run without it.
"""
