"""tau, the time of a KV fetch, learned from the fetches that were seen (section 5.3: the exposed part of a fetch).

Rules that hold here
- No I/O, no clock. Times are cluster seconds, lengths tokens.
- tau(x) = base + slope x, by least squares over all fetches seen, old ones forgotten by a factor of `KEEP` a fetch.
  The profile's values count as `PRIOR` fetches, so the first odd one changes little and no sample is needed.
- Neither coefficient becomes negative; the profile's least number of tokens stays.
"""

from __future__ import annotations

import math

from shared.timing import FetchModel

KEEP = 0.98
PRIOR = 4.0
_PRIOR_TOKENS = (1_000.0, 100_000.0)  # where the prior's fetches lie
_PRIOR_X, _PRIOR_XX = sum(_PRIOR_TOKENS), sum(x * x for x in _PRIOR_TOKENS)


class FetchTimes:
    """One kind of node's."""

    def __init__(self, prior: FetchModel) -> None:
        self._prior = prior
        self._prior_y = sum(prior.base_s + prior.per_token_s * x for x in _PRIOR_TOKENS)
        self._prior_xy = sum(x * (prior.base_s + prior.per_token_s * x) for x in _PRIOR_TOKENS)
        self._n = self._x = self._xx = self._y = self._xy = 0.0
        self.seen = 0
        self.model = prior

    def observed(self, tokens: int, seconds: float) -> None:
        """A fetch of that many tokens took so long. Odd values are passed over."""
        if tokens <= 0 or not (math.isfinite(seconds) and seconds >= 0):
            return
        self.seen += 1
        x, y = float(tokens), seconds
        self._n = KEEP * self._n + 1.0
        self._x = KEEP * self._x + x
        self._xx = KEEP * self._xx + x * x
        self._y = KEEP * self._y + y
        self._xy = KEEP * self._xy + x * y
        self.model = self._fit()

    def _fit(self) -> FetchModel:
        weight = PRIOR * KEEP**self.seen / len(_PRIOR_TOKENS)
        n = self._n + weight * len(_PRIOR_TOKENS)
        sx = self._x + weight * _PRIOR_X
        sxx = self._xx + weight * _PRIOR_XX
        sy = self._y + weight * self._prior_y
        sxy = self._xy + weight * self._prior_xy
        spread = n * sxx - sx * sx
        slope = max(0.0, (n * sxy - sx * sy) / spread) if spread > 1e-9 * n * sxx else self._prior.per_token_s
        base = (sy - slope * sx) / n
        if base < 0:  # through the origin then
            base, slope = 0.0, max(0.0, sxy / sxx)
        return FetchModel(base, slope, self._prior.min_tokens)
