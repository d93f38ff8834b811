"""The local cluster: launcher, node agents, fork servers, and the `Cluster` a notebook talks to."""
