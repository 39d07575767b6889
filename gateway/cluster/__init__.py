"""The gateway of a cluster: one address for all services, in pods and on hosts, for clients with keys.

It is the request pipeline of `gateway.proxy` with other routers and backends:

* `watched_objects`: what it watches of the cluster, and the part of each object that it keeps
* `catalog`: the services, their endpoints and tokens, as they follow from these objects
* `routed_service`: one service, and the choice of the endpoint for each request
* `keys`: the clients' keys, and the services that each may use
* `gateway_process`: watches, listeners, health and metrics, and their orderly end
"""
