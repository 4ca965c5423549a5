"""The worker process: one node of the cluster, with its engine."""
