"""The measurements of the engines of a host, which its agent makes while the host is idle."""
