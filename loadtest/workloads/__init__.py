"""Workloads of agents made up from statistics: `agents` (sessions without end), `composition`, `arrivals`.

Rules that hold here
- Pure: no I/O, no clock. All randomness comes from a seed, so equal arguments give equal sessions and arrivals.
- A workload is a module with a `PROFILE`, numbers only, and a table of what it gives beside the figures of
  arXiv:2611.12304 ("the paper") that it was fitted to. What an agent does with the numbers is in `session`.

Terms of the tables
- Hit rates are of an unlimited cache. `h*` also holds outputs, as the paper's pool and the replay's report do:
  1 - (uncached - output of the steps that are gone on from) / prompt. `prompts only` is that of `trace_stats`,
  which no output serves. Of the paper, h* is hit rate / (1 - lost reuse) of Table C.1.
- `T_pause` is all pauses over all requests, as in Equation C.1, but without waits for sub-agents.
- `branches` is how many branches an agent has running or in a pause at a time.
"""
