"""The way of requests to engines: the proxy process, its ports and certificate, and the services that it exposes."""
