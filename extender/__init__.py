"""The scheduler extender: scores and filters nodes for kube-scheduler by the speed of the model that a pod serves.

It reads the cluster and writes nothing. A scheduler sends pod and nodes to `server`; `wire` has their JSON. `feed`
keeps `speed_table` equal to the cluster, which answers from what it has computed before. `subject` says which model a
pod serves, `node_facts` what a node is, `misfit` why it cannot run the model, and `score` how good it is.

It has no verb that preempts or binds: of Pomona's parts only the planner of the queue preempts.
"""
