"""A cluster in simulated time: the services' and workers' own decision modules, driven by an event queue."""
