"""The paper's tables and figures again, from simulated runs: what is run, and how it is set beside the paper's figures."""
