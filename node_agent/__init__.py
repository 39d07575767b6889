"""The node agent: it reports the hardware of a node of the cluster as a NodeFitness, labels and metrics.

One runs on each node, as `pomona node-agent`. It writes its own NodeFitness and labels of its own Node, nothing else.
"""
