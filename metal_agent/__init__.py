"""The agent of an off-cluster host: runs models as native processes, as a kubelet runs pods."""
