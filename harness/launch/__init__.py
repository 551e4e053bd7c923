"""Where the work of a run is done: in processes of this machine, or on the nodes of a cluster."""
