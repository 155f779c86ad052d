"""Parts of `proxy_overhead`: the load, the programs that it measures, their upstream and the bare relay."""
